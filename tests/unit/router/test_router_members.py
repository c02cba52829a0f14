"""Who may join, who gets the work, and when the router is ready."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_cluster import Cluster, read
from scripted_node import ScriptedNode, decode, ignore, prefill, until

from router.clock import NodeClock
from splitserve.core.node import NodeKind
from splitserve.rpc.channel import open_channel
from splitserve.v1 import work_pb2

CODE = grpc.StatusCode


async def health(cluster: Cluster) -> int:
    async with open_channel(cluster.router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="splitserve.v1.Router"))
        return int(answer.status)


async def test_router_is_ready_with_one_node_of_each_kind_and_names_the_missing(
    cluster: Cluster,
) -> None:
    async def missing() -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask()
        assert caught.value.code() is CODE.UNAVAILABLE
        return str(caught.value.details())

    assert await missing() == "no prefill and no decode node is joined"
    await cluster.prefill()
    assert await missing() == "no decode node is joined"
    assert await health(cluster) == 2
    second = await cluster.decode()
    await cluster.ask(max_tokens=2)
    async with asyncio.timeout(5):
        while await health(cluster) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await second.leave()
    await until(lambda: cluster.router.members.missing)
    assert await missing() == "no decode node is joined"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model_fingerprint", "other-weights", "model_fingerprint: 'other'"),
        ("model_fingerprint", "arch-others", "model_fingerprint: 'arch-others'"),
        ("vocab_size", 513, "vocab_size: 513"),
        ("kv_dtype", "bfloat16", "kv_dtype: 'bfloat16'"),
        ("transports", ("nixl",), "transports: ['nixl']"),
        ("transports", (), "transports: []"),
    ],
)
async def test_incompatible_node_is_refused_with_the_reason(
    cluster: Cluster, field: str, value: Any, says: str
) -> None:
    await cluster.prefill()
    node = await cluster.decode(**{field: value})
    assert node.join_error is not None
    assert node.join_error.code() is CODE.FAILED_PRECONDITION
    assert says in str(node.join_error.details())
    assert cluster.router.members.missing == [NodeKind.DECODE]


async def test_node_that_cannot_be_dialled_back_is_not_joined(cluster: Cluster) -> None:
    node = await cluster.prefill(address="127.0.0.1:1")
    assert node.join_error is not None
    assert node.join_error.code() is CODE.UNAVAILABLE
    assert not cluster.router.members.sessions


async def test_work_goes_to_the_least_loaded_node(cluster: Cluster) -> None:
    firsts = [await cluster.prefill(ignore) for _ in range(2)]
    await cluster.decode()
    calls = [cluster.call([5] * 100)]
    await until(lambda: any(node.starts for node in firsts))
    busy = next(node for node in firsts if node.starts)
    other = next(node for node in firsts if not node.starts)
    for number in range(3):
        calls.append(cluster.call([6 + number] * 30))
        await until(lambda n=number: len(other.starts) == n + 1)
    assert len(busy.starts) == 1
    calls.append(cluster.call([9] * 30))  # 90 prompt tokens are fewer than 100
    await until(lambda: len(other.starts) == 4)
    calls.append(cluster.call([10] * 30))
    await until(lambda: len(busy.starts) == 2)
    for call in calls:
        call.cancel()


async def test_a_prompt_goes_where_its_beginning_is_unless_that_node_has_far_more_to_do(
    cluster: Cluster,
) -> None:
    firsts = [await cluster.prefill() for _ in range(3)]
    await cluster.decode()
    turns = [[7] * 64, [7] * 100, [7] * 130]
    await cluster.ask(turns[0], max_tokens=4)
    holder = next(node for node in firsts if node.starts)
    for turn in turns[1:]:
        await cluster.ask(turn, max_tokens=4)
    assert len(holder.starts) == 3
    holder.behave = ignore
    calls = [cluster.call([7] * 130 + [8] * 40)]  # 42 tokens to compute
    await until(lambda: len(holder.starts) == 4)
    calls.append(cluster.call([7] * 130 + [9] * 60))  # 62 more there, 190 elsewhere
    await until(lambda: len(holder.starts) == 5)
    calls.append(cluster.call([7] * 64 + [9] * 50))  # 104 + 50 there, 114 elsewhere
    await until(lambda: sum(len(node.starts) for node in firsts) == 6)
    assert len(holder.starts) == 5
    for call in calls:
        call.cancel()


async def test_a_node_without_a_prefix_cache_attracts_nobody(cluster: Cluster) -> None:
    plain = await cluster.prefill(prefix_cache=False)
    await cluster.decode()
    await cluster.ask([7] * 64, max_tokens=4)
    session = next(s for s in cluster.router.members.sessions if s.info.kind is NodeKind.PREFILL)
    assert plain.starts
    assert len(session.prefixes) == 0


async def test_decode_work_goes_to_the_node_with_fewest_requests(cluster: Cluster) -> None:
    await cluster.prefill()
    seconds = [await cluster.decode(lambda n, s: decode(n, s, steps=1)) for _ in range(3)]
    calls = []
    for number in range(6):
        calls.append(cluster.call(max_tokens=50))
        await until(lambda n=number: sum(len(node.starts) for node in seconds) == n + 1)
    assert [len(node.starts) for node in seconds] == [2, 2, 2]
    for call in calls:
        call.cancel()


async def test_node_that_leaves_finishes_what_it_runs_and_gets_no_more(cluster: Cluster) -> None:
    await cluster.prefill()
    leaving = await cluster.decode(ignore)
    call = cluster.call(max_tokens=5)
    await until(lambda: leaving.starts)
    staying = await cluster.decode()
    await leaving.leave()
    await until(lambda: len(cluster.router.members.usable(NodeKind.DECODE)) == 1)
    await cluster.ask(max_tokens=5)
    assert len(staying.starts) == 1
    decode(leaving, leaving.starts[0])
    reply = await read(call)
    assert "RETRIED" not in reply.events
    # Its stream ends once nothing is left on it.
    await until(lambda: len(cluster.router.members.sessions) == 2)


async def test_join_ends_with_the_work_stream_so_that_the_node_joins_again(
    cluster: Cluster,
) -> None:
    first = await cluster.prefill()
    first.break_stream()
    await until(lambda: first.join_error)
    assert first.join_error is not None
    assert first.join_error.code() is CODE.UNAVAILABLE
    assert not cluster.router.members.sessions


async def test_a_node_that_joins_twice_is_there_once(cluster: Cluster) -> None:
    first = await cluster.prefill()
    again = asyncio.create_task(first._join(cluster.router.address))
    await until(lambda: first.num_joined == 2)
    assert len(cluster.router.members.usable(NodeKind.PREFILL)) == 1
    again.cancel()


async def test_leases_are_renewed_while_they_are_needed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.session.PING_INTERVAL_S", 0.05)
    first, second = await cluster.prefill(), await cluster.decode(ignore)
    call = cluster.call()
    await until(lambda: first.renewed == {s.assignment.ticket for s in second.starts} != set())
    call.cancel()


@pytest.mark.parametrize("skew_s", [-3600, 3600])
async def test_lifetime_is_in_order_though_a_nodes_clock_is_off(
    cluster: Cluster, skew_s: int
) -> None:
    first = ScriptedNode(NodeKind.PREFILL, prefill)
    first.skew_ns = skew_s * 10**9
    await first.start(cluster.router.address)
    await cluster.decode()
    reply = await cluster.ask(max_tokens=5)
    await first.stop()
    times = [event.time_ns for event in reply.last.lifetime.events]
    assert times == sorted(times)
    assert times[-1] - times[0] < 10**9
    assert [event.node for event in reply.last.lifetime.events][:2] == ["router", first.info.name]


def test_clock_trusts_the_shortest_round_trip() -> None:
    now = 0
    clock = NodeClock(lambda: now)
    for begin, trip, node_time in [(0, 100, 1090), (1000, 10, 2005), (3000, 400, 4399)]:
        now = begin
        ping = clock.ping()
        now = begin + trip
        clock.pong(work_pb2.Pong(sequence=ping.sequence, time_ns=node_time))
    assert clock.to_ours(5000) == 4000
    clock.pong(work_pb2.Pong(sequence=99, time_ns=0))
    assert clock.to_ours(5000) == 4000
