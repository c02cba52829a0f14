"""The router question's nodes: they speak the real protocol and compute nothing.

``python -m bench.relay_nodes ROUTER MODEL STREAMS``. The decode node waits until that many
requests are there, then steps all of them as fast as its router reads: one message per step.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.child import serve
from bench.relay_text import token_at
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.node import NodeInfo, NodeKind
from splitserve.core.request import Request, TokenLogprob
from splitserve.core.ticket import new_epoch
from splitserve.model.config import ModelConfig
from splitserve.model.fingerprint import architecture_fingerprint
from splitserve.rpc.convert import (
    answers_from_proto,
    node_info_to_proto,
    progress_to_proto,
    request_from_proto,
)
from splitserve.rpc.membership import Membership
from splitserve.rpc.server import RpcServer
from splitserve.v1 import work_pb2, work_pb2_grpc

NO_EOS: frozenset[int] = frozenset()


class ScriptedNode(work_pb2_grpc.PrefillNodeServicer, work_pb2_grpc.DecodeNodeServicer):
    """A node of either kind; use `open`.

    Args:
        info: What it says it is.
        streams: Requests that a decode node waits for before it steps them.
    """

    def __init__(self, info: NodeInfo, streams: int) -> None:
        self.info = info
        self.joined = asyncio.Event()
        self._streams = streams
        self._waiting: list[Request] = []
        self._steps: set[asyncio.Task[None]] = set()
        # Steps and pongs are written by different tasks; a stream takes one message at a time.
        self._writing = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, kind: NodeKind, router: str, model: Path, streams: int
    ) -> AsyncIterator["ScriptedNode"]:
        """Serves and is a member; leaves at the end."""
        rpc = RpcServer(())
        node = cls(_info(kind, rpc.bind("127.0.0.1:0"), model), streams)
        if kind is NodeKind.PREFILL:
            work_pb2_grpc.add_PrefillNodeServicer_to_server(node, rpc.server)
        else:
            work_pb2_grpc.add_DecodeNodeServicer_to_server(node, rpc.server)
        await rpc.start()
        membership = asyncio.create_task(Membership(router, node.info, 10.0, node._on_join).run())
        try:
            yield node
        finally:
            membership.cancel()
            await asyncio.gather(membership, return_exceptions=True)
            await rpc.stop(0)

    async def Work(self, commands: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        """The router's stream."""
        await anext(commands)  # Hello; nobody else knows this address.
        welcome = work_pb2.Welcome(node=node_info_to_proto(self.info))
        await self._write(context, work_pb2.WorkUpdate(welcome=welcome))
        async for command in commands:
            kind = command.WhichOneof("command")
            if kind == "ping":
                pong = work_pb2.Pong(sequence=command.ping.sequence, time_ns=time.time_ns())
                await self._write(context, work_pb2.WorkUpdate(pong=pong))
            elif kind == "start":
                if self.info.kind is NodeKind.PREFILL:
                    await self._prefill(request_from_proto(command.start.assignment), context)
                else:
                    [request] = answers_from_proto(command.start)
                    self._gather(request, context)

    async def _prefill(self, request: Request, context: Any) -> None:
        request.stamp(LifetimeEventKind.PREFILL_BEGIN)
        request.stamp(LifetimeEventKind.PREFILL_END)
        await self._step([request], context)

    def _gather(self, request: Request, context: Any) -> None:
        for kind in ("MIGRATION_BEGIN", "MIGRATION_END", "DECODE_BEGIN"):
            request.stamp(LifetimeEventKind[kind])
        self._waiting.append(request)
        if len(self._waiting) == self._streams:
            batch, self._waiting = self._waiting, []
            steps = asyncio.create_task(self._decode(batch, context))
            self._steps.add(steps)
            steps.add_done_callback(self._steps.discard)

    async def _decode(self, batch: list[Request], context: Any) -> None:
        while batch:
            await self._step(batch, context)
            batch = [request for request in batch if len(request.token_ids) < request.max_length]

    async def _step(self, batch: Sequence[Request], context: Any) -> None:
        """One more token of each; returns once the stream has taken them."""
        news = []
        for request in batch:
            token_id = token_at(len(request.token_ids))
            finish_reason = request.append(token_id, NO_EOS)
            told = request.tell(TokenLogprob(token_id, 0.0), finish_reason)
            news.append(progress_to_proto(told))
        await self._write(context, work_pb2.WorkUpdate(step=work_pb2.Step(progress=news)))

    async def _write(self, context: Any, update: work_pb2.WorkUpdate) -> None:
        async with self._writing:
            await context.write(update)

    async def _on_join(self, joined: bool) -> None:
        if joined:
            self.joined.set()


def _info(kind: NodeKind, address: str, model: Path) -> NodeInfo:
    config = ModelConfig.from_dir(model)
    return NodeInfo(
        kind=kind,
        address=address,
        epoch=new_epoch(),
        model=config.name,
        model_fingerprint=f"{architecture_fingerprint(model)}-scripted",
        vocab_size=config.vocab_size,
        kv_dtype="float32",
        block_size=16,
        num_blocks=1,
        max_model_len=config.max_position_embeddings,
        transports=("shm",),
        version="scripted",
    )


async def main(router: str, model: Path, streams: int) -> None:
    """Both nodes, for as long as we are asked anything."""
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(ScriptedNode.open(kind, router, model, streams))
            for kind in NodeKind
        ]

        async def joined() -> None:
            for node in nodes:
                await node.joined.wait()

        await serve(joined)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
