"""A node's end of the work streams, over a real server."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from splitserve.core.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.core.node import NodeInfo, NodeKind
from splitserve.core.request import FinishReason, Progress
from splitserve.engine.work import WorkStreams
from splitserve.rpc.channel import open_channel
from splitserve.rpc.errors import error_from_rpc
from splitserve.rpc.server import RpcServer
from splitserve.v1 import work_pb2, work_pb2_grpc

INFO = NodeInfo(
    NodeKind.PREFILL, "h:1", "epoch", "m", "f-w", 9, "float32", 16, 9, 99, ("shm",), "0"
)
DEADLINE_S = 5.0


class Recorder:
    """Takes commands as a node would, and remembers them."""

    def __init__(self) -> None:
        self.holds: set[str] = set()
        self.cancelled: list[str] = []
        self.renewed: list[str] = []
        self.refuse: Exception | None = None
        self.changed = asyncio.Event()

    def start(self, command: work_pb2.PrefillStart) -> None:
        if self.refuse:
            raise self.refuse
        self.holds.add(command.assignment.ticket)
        self.changed.set()

    def cancel(self, ticket: str, indexes) -> None:
        self.holds.discard(ticket)
        self.cancelled += [ticket] * len(indexes)
        self.changed.set()

    def renew(self, tickets) -> None:
        self.renewed += tickets
        self.changed.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Service(work_pb2_grpc.PrefillNodeServicer):
    def __init__(self, work: WorkStreams) -> None:
        self.work = work

    async def Work(self, commands: AsyncIterator[work_pb2.PrefillCommand], context) -> None:
        await self.work.serve(commands, context)


@pytest.fixture
async def handler():
    return Recorder()


@pytest.fixture
async def work(handler):
    return WorkStreams(INFO, handler)


@pytest.fixture
async def stub(work):
    rpc = RpcServer([])
    address = rpc.bind("127.0.0.1:0")
    work_pb2_grpc.add_PrefillNodeServicer_to_server(Service(work), rpc.server)
    await rpc.start()
    async with open_channel(address) as channel:
        yield work_pb2_grpc.PrefillNodeStub(channel)
    await rpc.stop(0)


async def open_stream(stub, epoch: str = "epoch"):
    call = stub.Work(timeout=DEADLINE_S)
    hello = work_pb2.Hello(router_id="r", node_epoch=epoch)
    await call.write(work_pb2.PrefillCommand(hello=hello))
    return call


async def start(call, ticket: str, indexes=()) -> None:
    assignment = work_pb2.Assignment(ticket=ticket, token_ids=[1], prompt_length=1, indexes=indexes)
    command = work_pb2.PrefillStart(assignment=assignment)
    await call.write(work_pb2.PrefillCommand(start=command))


async def test_the_first_update_says_who_the_node_is(stub):
    call = await open_stream(stub)
    assert (await call.read()).welcome.node.epoch == "epoch"


async def test_another_epoch_is_refused(stub):
    call = await open_stream(stub, epoch="earlier")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert error_from_rpc(caught.value).code == "FAILED_PRECONDITION"


async def test_one_step_s_news_of_many_requests_is_one_message(stub, work, handler):
    call = await open_stream(stub)
    await call.read()
    for ticket in "abc":
        await start(call, ticket)
    await handler.until(lambda: len(handler.holds) == 3)
    work.publish([Progress(ticket, [7]) for ticket in "abc"])
    step = (await call.read()).step
    assert [progress.ticket for progress in step.progress] == ["a", "b", "c"]


async def test_a_stream_that_breaks_drops_what_it_started_and_nothing_else(stub, work, handler):
    broken, whole = await open_stream(stub), await open_stream(stub)
    await broken.read()
    await whole.read()
    await start(broken, "a")
    await start(broken, "b")
    await start(whole, "c")
    await handler.until(lambda: len(handler.holds) == 3)
    broken.cancel()
    await handler.until(lambda: handler.holds == {"c"})
    assert sorted(handler.cancelled) == ["a", "b"]
    work.publish([Progress("a", [7]), Progress("c", [8])])
    assert (await whole.read()).step.progress[0].ticket == "c"


async def test_a_router_cannot_cancel_another_router_s_request(stub, handler):
    mine, other = await open_stream(stub), await open_stream(stub)
    await start(mine, "a")
    await handler.until(lambda: handler.holds == {"a"})
    await other.read()
    cancel = work_pb2.Cancel(ticket="a")
    await other.write(work_pb2.PrefillCommand(cancel=cancel))
    await other.write(work_pb2.PrefillCommand(ping=work_pb2.Ping(sequence=1)))
    assert (await other.read()).pong.sequence == 1
    assert handler.holds == {"a"}


async def test_a_finished_request_is_not_cancelled_when_its_stream_ends(stub, work, handler):
    call = await open_stream(stub)
    await call.read()
    await start(call, "a")
    await start(call, "b")
    await handler.until(lambda: len(handler.holds) == 2)
    work.publish([Progress("a", [7], finish_reason=FinishReason.STOP)])
    await call.read()
    await call.done_writing()
    await handler.until(lambda: handler.cancelled == ["b"])


async def test_a_refusal_is_news_of_the_request_and_the_stream_goes_on(stub, handler):
    call = await open_stream(stub)
    await call.read()
    handler.refuse = ResourceExhaustedError("queue: full")
    await start(call, "a")
    progress = (await call.read()).step.progress[0]
    assert (progress.ticket, progress.error.code) == ("a", "RESOURCE_EXHAUSTED")
    handler.refuse = InvalidArgumentError("prompt tokens: 0")
    await start(call, "b")
    assert (await call.read()).step.progress[0].error.code == "INVALID_ARGUMENT"


async def test_pings_answer_with_the_node_s_clock_and_renewals_arrive(stub, handler):
    call = await open_stream(stub)
    await call.read()
    await call.write(work_pb2.PrefillCommand(renew=work_pb2.RenewLeases(tickets=["x", "y"])))
    await call.write(work_pb2.PrefillCommand(ping=work_pb2.Ping(sequence=41)))
    pong = (await call.read()).pong
    assert pong.sequence == 41
    assert pong.time_ns > 0
    assert handler.renewed == ["x", "y"]


async def test_answers_of_a_ticket_end_one_by_one(stub, work, handler):
    call = await open_stream(stub)
    await call.read()
    await start(call, "a", indexes=[0, 1, 2])
    await handler.until(lambda: "a" in handler.holds)
    work.publish([Progress("a", [7], finish_reason=FinishReason.STOP, index=1)])
    await call.read()
    cancel = work_pb2.Cancel(ticket="a", indexes=[0, 1])
    await call.write(work_pb2.PrefillCommand(cancel=cancel))
    await handler.until(lambda: handler.cancelled)
    assert handler.cancelled == ["a"], "1 had ended"
    work.publish([Progress("a", [8], index=2)])
    assert (await call.read()).step.progress[0].index == 2
    call.cancel()
    await handler.until(lambda: handler.cancelled == ["a", "a"])
