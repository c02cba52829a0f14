"""The wire peer of a router: a node that speaks the real protocol and does as a test says."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import grpc
import grpc.aio

from splitserve.core.lifetime import LifetimeEventKind as Kind
from splitserve.core.node import NodeInfo, NodeKind
from splitserve.core.ticket import new_epoch
from splitserve.rpc.channel import open_channel
from splitserve.rpc.convert import node_info_to_proto
from splitserve.rpc.server import SERVER_OPTIONS
from splitserve.v1 import common_pb2, node_pb2, node_pb2_grpc, work_pb2, work_pb2_grpc

WAIT_S = 10.0


def token_at(position: int, index: int = 0) -> int:
    """The model of these tests: a token depends on its position and answer alone."""
    return 10 + position % 200 + 200 * (index % 2)


def tokens_of(prompt_length: int, count: int, index: int = 0) -> list[int]:
    return [token_at(position, index) for position in range(prompt_length, prompt_length + count)]


async def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (not every condition has an event)
            await asyncio.sleep(0.002)


Behaviour = Callable[["ScriptedNode", Any], None]


def prefill(node: "ScriptedNode", start: Any) -> None:
    """Computes at once, as a prefill node does."""
    assignment = start.assignment
    length = len(assignment.token_ids)
    done = length + 1 >= assignment.prompt_length + assignment.sampling.max_tokens
    events = [Kind.PREFILL_BEGIN, Kind.PREFILL_END]
    for index in assignment.indexes:
        node.tell(
            assignment.ticket,
            [token_at(length, index)],
            events,
            index=index,
            finish_reason=2 if done else 0,
        )
        events = []


def decode(node: "ScriptedNode", start: Any, steps: int | None = None) -> None:
    """Pulls and generates at once, up to the end or for some steps only."""
    assignment = start.assignment
    end = assignment.prompt_length + assignment.sampling.max_tokens
    begin = len(assignment.token_ids) + 1
    if not start.next_token_ids:
        return  # It comes early.
    assert len(start.next_token_ids) == len(assignment.indexes)
    stop = end if steps is None else min(end, begin + steps)
    events = [Kind.MIGRATION_BEGIN, Kind.MIGRATION_END, Kind.DECODE_BEGIN]
    for position, index in product(range(begin, stop), assignment.indexes):
        last = position == end - 1
        node.tell(
            assignment.ticket,
            [token_at(position, index)],
            events + [Kind.DECODE_END] * last,
            index=index,
            finish_reason=2 if last else 0,
        )
        events = []


def refuse(code: str) -> Behaviour:
    def behave(node: "ScriptedNode", start: Any) -> None:
        node.tell(start.assignment.ticket, error=(code, "as the test says"))

    return behave


def ignore(node: "ScriptedNode", start: Any) -> None:
    """Takes the work and never says anything of it."""


class ScriptedNode(
    work_pb2_grpc.PrefillNodeServicer,
    work_pb2_grpc.DecodeNodeServicer,
    node_pb2_grpc.NodeControlServicer,
):
    def __init__(self, kind: NodeKind, behave: Behaviour, **info: Any) -> None:
        self.behave = behave
        self.skew_ns = 0
        self.answers_pings = True
        self.answers_status = True
        self.starts: list[Any] = []
        self.first_tokens: list[Any] = []
        self.cancels: list[str] = []
        self.cancelled_answers: list[int] = []
        self.renewed: set[str] = set()
        self.join_error: grpc.aio.AioRpcError | None = None
        self.joined = asyncio.Event()
        self.num_joined = 0
        self._kind = kind
        self._info = info
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self._membership: asyncio.Task[None] | None = None

    async def start(self, router: str) -> "ScriptedNode":
        """Serves, joins and waits until the router has dialled back."""
        await self.serve()
        self._membership = asyncio.create_task(self._join(router))
        async with asyncio.timeout(WAIT_S):
            await self.joined.wait()
        return self

    async def serve(self) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        port = self.server.add_insecure_port("127.0.0.1:0")
        if self._kind is NodeKind.PREFILL:
            work_pb2_grpc.add_PrefillNodeServicer_to_server(self, self.server)
        else:
            work_pb2_grpc.add_DecodeNodeServicer_to_server(self, self.server)
        node_pb2_grpc.add_NodeControlServicer_to_server(self, self.server)
        fields: dict[str, Any] = {
            "kind": self._kind,
            "address": f"127.0.0.1:{port}",
            "epoch": new_epoch(),
            "model": "tiny",
            "model_fingerprint": "arch-weights",
            "vocab_size": 512,
            "kv_dtype": "float32",
            "block_size": 16,
            "num_blocks": 64,
            "max_model_len": 1024,
            "transports": ("shm",),
            "version": "test",
        }
        self.info = NodeInfo(**fields | self._info)
        await self.server.start()

    async def _join(self, router: str) -> None:
        async with open_channel(router) as channel:
            call = node_pb2_grpc.MembershipStub(channel).Join(node_info_to_proto(self.info))
            try:
                async for _ in call:
                    self.num_joined += 1
                    self.joined.set()
            except grpc.aio.AioRpcError as error:
                self.join_error = error
                self.joined.set()
            finally:
                call.cancel()

    async def leave(self) -> None:
        assert self._membership is not None
        self._membership.cancel()
        await asyncio.gather(self._membership, return_exceptions=True)

    def break_stream(self) -> None:
        """The work stream ends with an error, as when the node dies."""
        self._out.put_nowait(None)

    async def stop(self) -> None:
        if self._membership is not None:
            await self.leave()
        await self.server.stop(0)

    def tell(
        self,
        ticket: str,
        token_ids: list[int] | None = None,
        events: list[Kind] | None = None,
        *,
        index: int = 0,
        finish_reason: int = 0,
        error: tuple[str, str] | None = None,
        logprobs: list[common_pb2.TokenLogprob] | None = None,
    ) -> None:
        progress = work_pb2.Progress(
            ticket=ticket,
            index=index,
            token_ids=token_ids or [],
            logprobs=logprobs or [],
            events=[
                common_pb2.LifetimeEvent(kind=event.value, time_ns=self.now_ns())  # type: ignore[arg-type]
                for event in events or []
            ],
            finish_reason=finish_reason,  # type: ignore[arg-type]
        )
        if error is not None:
            progress.error.code, progress.error.message = error
        self._out.put_nowait(work_pb2.WorkUpdate(step=work_pb2.Step(progress=[progress])))

    def now_ns(self) -> int:
        return time.time_ns() + self.skew_ns

    async def Work(self, commands: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        self._out = asyncio.Queue()
        hello = await anext(commands)
        if hello.hello.node_epoch != self.info.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "node_epoch: another")
        welcome = work_pb2.Welcome(node=node_info_to_proto(self.info))
        await context.write(work_pb2.WorkUpdate(welcome=welcome))
        reader = asyncio.create_task(self._read(commands))
        try:
            while (update := await self._out.get()) is not None:
                await context.write(update)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the test broke the stream")
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[Any]) -> None:
        async for command in commands:
            kind = command.WhichOneof("command")
            if kind == "start":
                self.starts.append(command.start)
                self.behave(self, command.start)
            elif kind == "cancel":
                if command.cancel.indexes:
                    self.cancelled_answers += command.cancel.indexes
                else:
                    self.cancels.append(command.cancel.ticket)
            elif kind == "first_tokens":
                self.first_tokens.append(command.first_tokens)
                self.complete(command.first_tokens)
            elif kind == "renew":
                self.renewed.update(command.renew.tickets)
            elif kind == "ping" and self.answers_pings:
                pong = work_pb2.Pong(sequence=command.ping.sequence, time_ns=self.now_ns())
                self._out.put_nowait(work_pb2.WorkUpdate(pong=pong))

    def complete(self, command: Any) -> None:
        """An early start, with the tokens that it came without, is one as any other."""
        [early] = [s for s in self.starts if s.assignment.ticket == command.ticket]
        start = work_pb2.DecodeStart()
        start.CopyFrom(early)
        start.assignment.indexes[:] = command.indexes
        start.next_token_ids[:] = command.next_token_ids
        self.behave(self, start)

    async def GetNodeStatus(self, request: Any, context: Any) -> node_pb2.NodeStatus:
        if not self.answers_status:
            await asyncio.Event().wait()
        return node_pb2.NodeStatus(info=node_info_to_proto(self.info), serving=True)

    async def Drain(self, request: Any, context: Any) -> node_pb2.DrainResponse:
        return node_pb2.DrainResponse()
