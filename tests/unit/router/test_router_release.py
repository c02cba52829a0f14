"""Every way out of a request releases everything, once."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from scripted_cluster import Cluster, read
from scripted_node import Behaviour, ScriptedNode, decode, ignore, prefill, refuse, until

from splitserve.v1 import router_pb2

PHASES: dict[str, tuple[Behaviour, Behaviour, int, int]] = {
    # behaviours of the two nodes, then how many Cancels each is to get
    "while it is prefilled": (ignore, decode, 1, 0),
    "while it waits to be pulled": (prefill, ignore, 1, 1),
    "while it is decoded": (prefill, lambda node, start: decode(node, start, steps=3), 0, 1),
}


def reached(phase: str, first: ScriptedNode, second: ScriptedNode, cluster: Cluster) -> bool:
    if phase == "while it is prefilled":
        return bool(first.starts)
    if phase == "while it waits to be pulled":
        return bool(second.starts)
    return bool(second.starts) and cluster.tickets == 1


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", ["abort", "cancel", "deadline"])
async def test_leaving_cancels_exactly_once_on_whoever_holds_something(
    cluster: Cluster, phase: str, way: str
) -> None:
    prefills, decodes, first_cancels, second_cancels = PHASES[phase]
    first, second = await cluster.prefill(prefills), await cluster.decode(decodes)
    call = cluster.call(request_id="it", max_tokens=100, timeout=0.5 if way == "deadline" else 20)
    reading = asyncio.create_task(read(call))
    await until(lambda: reached(phase, first, second, cluster))
    if way == "abort":
        await cluster.stub.Abort(router_pb2.AbortRequest(request_id="it"))
        reply = await reading
        assert (
            reply.last.finish_reason == router_pb2.GenerateResponse(finish_reason=3).finish_reason
        )
        assert reply.last.lifetime.outcome == "aborted"
        assert reply.events[-1] == "FINISHED"
    elif way == "cancel":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: cluster.router.tracker.idle)
    outcome = {"abort": "aborted", "cancel": "cancelled", "deadline": "deadline_exceeded"}[way]
    assert cluster.router.tracker.totals == {outcome: 1}
    await until(
        lambda: (len(first.cancels), len(second.cancels)) == (first_cancels, second_cancels)
    )
    # Whatever was sent twice would have come before this.
    await probe(cluster, first, second)
    assert (len(first.cancels), len(second.cancels)) == (first_cancels, second_cancels)
    assert cluster.tickets == 0


async def probe(cluster: Cluster, first: ScriptedNode, second: ScriptedNode) -> None:
    first.behave, second.behave = prefill, decode
    await cluster.ask(max_tokens=3)


async def test_deadline_bounds_the_wait_for_a_node_with_room(cluster: Cluster) -> None:
    await cluster.prefill(refuse("RESOURCE_EXHAUSTED"))
    await cluster.decode()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: cluster.router.tracker.idle)


async def test_abort_of_an_unknown_request_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.Abort(router_pb2.AbortRequest(request_id="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def done() -> None:
    """Nothing to do beside the request."""


async def test_counters_are_zero_after_a_thousand_requests_of_every_fate(cluster: Cluster) -> None:
    rng = random.Random(0)

    def often(fails: str, works: Behaviour) -> Behaviour:
        def behave(node: ScriptedNode, start: Any) -> None:
            if start.assignment.request_id.startswith("fail"):
                refuse(fails)(node, start)
            elif start.assignment.request_id.startswith("leave") and rng.random() < 0.5:
                ignore(node, start)
            else:
                works(node, start)

        return behave

    for fails in ("INVALID_ARGUMENT", "INTERNAL"):
        await cluster.prefill(often(fails, prefill))
    for fails in ("NOT_FOUND", "UNAVAILABLE"):
        await cluster.decode(often(fails, decode))

    async def leave(call: Any, request_id: str) -> None:
        """At any moment after the router has it."""
        await until(lambda: call.done() or request_id in cluster.router.tracker._live)
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        call.cancel()

    async def one(number: int) -> str:
        fate = ("work", "fail", "leave")[number % 3]
        call = cluster.call(request_id=f"{fate}-{number}", max_tokens=8, timeout=60)
        leaving = asyncio.ensure_future(
            leave(call, f"leave-{number}") if fate == "leave" else done()
        )
        try:
            await read(call)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except asyncio.CancelledError:
            return "left"
        finally:
            await leaving
        return "OK"

    outcomes: list[str] = []
    for begin in range(0, 1000, 100):
        outcomes += await asyncio.gather(*(one(begin + n) for n in range(100)))
    tracker = cluster.router.tracker
    await until(lambda: tracker.idle)
    assert outcomes.count("left") > 100
    assert tracker.totals["cancelled"] > 100
    assert outcomes.count("OK") >= 334
    assert (tracker.num_queued, tracker.num_running, cluster.tickets) == (0, 0, 0)
    assert sum(tracker.totals.values()) == 1000
    for session in cluster.router.members.sessions:
        assert session.attempts.load == (0, 0, 0)
