"""How many tokens a second a router relays, against one bare gRPC hop with the same messages.

Run it: ``PYTHONPATH=tests python tests/unit/router/measure_relay.py``. Client, router and node are
a process each; give a file name to have the router's profile written there.
"""

import asyncio
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio
from scripted_node import ScriptedNode, prefill, token_at
from tiny_model import CHAT_TEMPLATE, train_tokenizer

from router.daemon import Router
from router.model import ServedModel
from splitserve.core.config import RouterConfig
from splitserve.core.node import NodeKind
from splitserve.rpc.channel import open_channel
from splitserve.rpc.server import SERVER_OPTIONS
from splitserve.text.chat import ChatTemplate
from splitserve.text.tokenizer import Tokenizer
from splitserve.v1 import common_pb2, router_pb2, router_pb2_grpc, work_pb2

STREAMS = 64
TOKENS = 1000
PROMPT = [1, 2, 3]


class StepNode(ScriptedNode):
    """Decodes all of its requests together, one message per step, once all have arrived."""

    def __init__(self) -> None:
        super().__init__(NodeKind.DECODE, self._gather, max_model_len=100_000)

    def _gather(self, node: ScriptedNode, start: Any) -> None:
        if len(self.starts) % STREAMS == 0:
            self._emitting = asyncio.create_task(self._emit(self.starts[-STREAMS:]))

    async def _emit(self, starts: list[Any]) -> None:
        tickets = [start.assignment.ticket for start in starts]
        for position in range(len(PROMPT) + 1, len(PROMPT) + TOKENS):
            last = position == len(PROMPT) + TOKENS - 1
            step = work_pb2.Step(
                progress=[
                    work_pb2.Progress(
                        ticket=ticket,
                        token_ids=[token_at(position)],
                        finish_reason=2 if last else 0,  # type: ignore[arg-type]
                    )
                    for ticket in tickets
                ]
            )
            self._out.put_nowait(work_pb2.WorkUpdate(step=step))
            while self._out.qsize() > 2:  # noqa: ASYNC110  (as fast as the stream takes it)
                await asyncio.sleep(0)


class BareService(router_pb2_grpc.RouterServicer):
    """The same messages, from nowhere."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        for position in range(len(PROMPT), len(PROMPT) + TOKENS):
            delta = router_pb2.GenerateResponse(
                request_id="0123456789abcdef", text=" word", token_ids=[token_at(position)]
            )
            await context.write(delta)

    def Abort(self, request: Any, context: Any) -> Any: ...

    def GetLifetime(self, request: Any, context: Any) -> Any: ...

    def GetStatus(self, request: Any, context: Any) -> Any: ...


def run_router(pipe: Any, profile: str) -> None:
    async def main() -> None:
        model = ServedModel(
            "tiny", "arch", 512, 100_000, Tokenizer(train_tokenizer(512), {}),
            ChatTemplate(CHAT_TEMPLATE),
        )  # fmt: skip
        router = Router(RouterConfig(model=Path("unused"), listen="127.0.0.1:0"), model)
        await router.start()
        pipe.send(router.address)
        await asyncio.to_thread(pipe.recv)
        await router.stop()

    if profile:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(asyncio.run, main())
        profiler.dump_stats(profile)
    else:
        asyncio.run(main())


def run_nodes(pipe: Any, address: str) -> None:
    async def main() -> None:
        nodes = [
            await ScriptedNode(NodeKind.PREFILL, prefill, max_model_len=100_000).start(address),
            await StepNode().start(address),
        ]
        pipe.send("joined")
        await asyncio.to_thread(pipe.recv)
        for node in nodes:
            await node.stop()

    asyncio.run(main())


def run_bare(pipe: Any) -> None:
    async def main() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        router_pb2_grpc.add_RouterServicer_to_server(BareService(), server)
        pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    asyncio.run(main())


async def measure(address: str) -> tuple[float, float]:
    """Tokens a second, and tokens in a message."""
    messages = tokens = 0

    async def read(stub: Any) -> None:
        nonlocal messages, tokens
        sampling = common_pb2.SamplingParams(max_tokens=TOKENS)
        request = router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=PROMPT), sampling=sampling
        )
        async for message in stub.Generate(request):
            messages += 1
            tokens += len(message.token_ids)

    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        begin = time.perf_counter()
        await asyncio.gather(*(read(stub) for _ in range(STREAMS)))
        seconds = time.perf_counter() - begin
    assert tokens == STREAMS * TOKENS, tokens
    return tokens / seconds, tokens / messages


def main() -> None:
    profile = sys.argv[1] if len(sys.argv) > 1 else ""
    context = multiprocessing.get_context("spawn")
    for name in ("bare", "router") * 3:
        ours, theirs = context.Pipe()
        others = [context.Process(target=run_bare, args=(theirs,))]
        pipes = [ours]
        if name == "router":
            others = [context.Process(target=run_router, args=(theirs, profile))]
        others[0].start()
        address = ours.recv()
        if name == "router":
            ours, theirs = context.Pipe()
            pipes.append(ours)
            others.append(context.Process(target=run_nodes, args=(theirs, address)))
            others[1].start()
            ours.recv()
        rate, size = asyncio.run(measure(address))
        print(f"{name:7} {rate:9.0f} tokens/s, {size:.2f} tokens a message")  # noqa: T201
        for pipe, process in reversed(list(zip(pipes, others, strict=True))):
            pipe.send("stop")
            process.join()


if __name__ == "__main__":
    main()
