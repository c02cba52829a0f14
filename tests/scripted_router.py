"""A router that says what a test tells it to, on a port of its own."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from splitserve.core.errors import NotFoundError, SplitserveError
from splitserve.core.lifetime import KvTransfer, Lifetime, LifetimeEvent, LifetimeEventKind
from splitserve.core.node import NodeInfo, NodeKind, NodeStatus, RankInfo
from splitserve.rpc.convert import lifetime_to_proto, node_status_to_proto
from splitserve.rpc.server import RpcServer
from splitserve.v1 import common_pb2, router_pb2, router_pb2_grpc

DEADLINE_S = 10.0
MS = 1_000_000

K = LifetimeEventKind


def life(*events: tuple[LifetimeEventKind, float], request_id: str = "r1") -> Lifetime:
    """A life of events at so many milliseconds; a migration moved 2 MB in 3 ms over shm."""
    moved = KvTransfer("shm", 2_000_000, 3 * MS)
    return Lifetime(
        request_id,
        [
            LifetimeEvent(
                kind,
                10**18 + round(at_ms * MS),
                "decode@127.0.0.1:2" if kind in DECODE_SIDE else "prefill@127.0.0.1:1",
                moved if kind is K.MIGRATION_END else None,
            )
            for kind, at_ms in events
        ],
        time_to_first_token_ns=40 * MS,
        outcome="stop",
    )


DECODE_SIDE = (K.MIGRATION_BEGIN, K.MIGRATION_END, K.DECODE_BEGIN, K.DECODE_END)

WHOLE_LIFE = life(
    (K.ISSUED, 0),
    (K.PREFILL_BEGIN, 10),
    (K.PREFILL_END, 40),
    (K.MIGRATION_BEGIN, 45),
    (K.MIGRATION_END, 50),
    (K.DECODE_BEGIN, 52),
    (K.DECODE_END, 99),
    (K.FINISHED, 100),
)

PREFILL_STATUS = NodeStatus(
    NodeInfo(
        NodeKind.PREFILL, "127.0.0.1:1", "e1", "tiny", "f", 512, "float32", 16, 10, 4096,
        ("shm", "tcp"), "0.1.0", (RankInfo(134_500_000, 2_000_000), RankInfo(61_000, 2_000_000)),
    ),
    10, 4, 1, 2, 2, 1, 3, 4, 0, 100, 200, 50, True,
)  # fmt: skip


def piece(text: str, *token_ids: int) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(request_id="r1", text=text, token_ids=token_ids)


def last(text: str = "", *token_ids: int) -> router_pb2.GenerateResponse:
    message = piece(text, *token_ids)
    message.finish_reason = common_pb2.FINISH_REASON_STOP
    message.usage.prompt_tokens = 3
    message.usage.completion_tokens = 2
    message.lifetime.CopyFrom(lifetime_to_proto(WHOLE_LIFE))
    return message


@dataclass
class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Streams ``script``: messages are sent, an error is raised, "hang" waits until cancelled."""

    script: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    cancelled: int = 0
    most_running: int = 0
    running: int = 0
    nodes: list[NodeStatus] = field(default_factory=lambda: [PREFILL_STATUS])
    answer: Callable[[router_pb2.GenerateRequest], AsyncIterator[Any]] | None = None

    async def Generate(self, request, context):
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.answer is not None:
                async for message in self.answer(request):
                    yield message
                return
            for step in self.script:
                if isinstance(step, SplitserveError):
                    raise step
                if step == "hang":
                    await asyncio.Event().wait()
                yield step
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def Abort(self, request, context):
        self.requests.append(request)
        if request.request_id != "r1":
            raise NotFoundError(f"request_id: {request.request_id!r} is not running")
        return router_pb2.AbortResponse()

    async def GetLifetime(self, request, context):
        if request.request_id != "r1":
            raise NotFoundError(f"request_id: {request.request_id!r} is not known")
        return lifetime_to_proto(WHOLE_LIFE)

    async def GetStatus(self, request, context):
        return router_pb2.RouterStatus(
            address="127.0.0.1:0",
            model="tiny",
            queued=1,
            running=2,
            finished={"stop": 7},
            nodes=map(node_status_to_proto, self.nodes),
        )


@contextmanager
def serve_scripted() -> Iterator[tuple[ScriptedRouter, str]]:
    """Serves a scripted router in a thread of its own; gives it and its address."""
    router = ScriptedRouter()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[RpcServer, str]:
        server = RpcServer(["splitserve.v1.Router"])
        router_pb2_grpc.add_RouterServicer_to_server(router, server.server)
        address = server.bind("127.0.0.1:0")
        await server.start()
        await server.set_serving(True)
        return server, address

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result(DEADLINE_S)
    try:
        yield router, address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits until something holds; fails with its name."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.005)


async def eventually_async(condition: Callable[[], bool], what: str) -> None:
    """The same beside a running loop."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.005)
