"""Nodes that fail, refuse or vanish: what the client notices of it."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from scripted_cluster import Cluster, read
from scripted_node import ScriptedNode, decode, ignore, prefill, refuse, tokens_of, until

from splitserve.core.lifetime import LifetimeEventKind as Kind

CODE = grpc.StatusCode


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    return caught.value


def cancels_of(node: ScriptedNode) -> list[bool]:
    """For each start, whether it was cancelled; fails if any was cancelled twice."""
    assert len(set(node.cancels)) == len(node.cancels)
    return [start.assignment.ticket in node.cancels for start in node.starts]


async def test_decode_node_lost_goes_on_elsewhere_without_gap_or_repeat(cluster: Cluster) -> None:
    first = await cluster.prefill()
    dying = await cluster.decode(lambda node, start: decode(node, start, steps=5))
    call = cluster.call(max_tokens=30)
    messages = [await call.read()]
    await until(lambda: dying.starts)
    healthy = await cluster.decode()
    dying.break_stream()
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    ids = [token_id for message in messages for token_id in message.token_ids]
    assert ids == tokens_of(3, 30)
    assert len({start.assignment.ticket for start in first.starts}) == 2
    assert first.starts[1].assignment.prompt_length == 3
    assert list(healthy.starts[0].assignment.token_ids) == [1, 2, 3, *tokens_of(3, 6)]
    assert list(healthy.starts[0].next_token_ids) == tokens_of(9, 1)
    kinds = [event.kind for event in messages[-1].lifetime.events]
    assert Kind.RETRIED.value in kinds


async def test_prefill_node_lost_while_it_computes_is_replaced(cluster: Cluster) -> None:
    dying = await cluster.prefill(ignore)
    await cluster.decode()
    call = cluster.call(max_tokens=5)
    await until(lambda: dying.starts)
    healthy = await cluster.prefill()
    dying.break_stream()
    reply = await read(call)
    assert reply.token_ids == tokens_of(3, 5)
    assert len(healthy.starts) == 1


async def test_prefill_node_lost_before_the_pull_is_replaced(cluster: Cluster) -> None:
    dying = await cluster.prefill()
    second = await cluster.decode(ignore)
    call = cluster.call(max_tokens=5)
    await until(lambda: second.starts)
    await cluster.prefill()
    second.behave = decode
    dying.break_stream()
    reply = await read(call)
    assert reply.token_ids == tokens_of(3, 5)
    assert cancels_of(second) == [True, False]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_loss_of_the_only_node_is_heard_within_a_second(cluster: Cluster, kind: str) -> None:
    first = await cluster.prefill(ignore if kind == "prefill" else prefill)
    second = await cluster.decode(ignore)
    dying = first if kind == "prefill" else second
    call = cluster.call()
    await until(lambda: dying.starts)
    await dying.leave()
    dying.break_stream()
    begin = time.monotonic()
    error = await failure(call)
    assert time.monotonic() - begin < 1
    assert error.code() is CODE.UNAVAILABLE
    assert f"no {kind} node" in error.details()
    assert dying.info.name in error.details()
    assert kind == "prefill" or cancels_of(first) == [True]


async def test_prefill_failures_are_heard_within_a_second(cluster: Cluster) -> None:
    first = await cluster.prefill(refuse("INTERNAL"))
    await cluster.decode()
    begin = time.monotonic()
    error = await failure(cluster.call())
    assert time.monotonic() - begin < 1
    assert error.code() is CODE.UNAVAILABLE
    assert "as the test says" in error.details()
    assert len(first.starts) == 4  # once, and max_retries = 3


async def test_refusal_by_every_decode_node_ends_in_time_and_cancels_the_lease(
    cluster: Cluster,
) -> None:
    first = await cluster.prefill()
    nodes = [await cluster.decode(refuse("RESOURCE_EXHAUSTED")) for _ in range(2)]
    begin = time.monotonic()
    error = await failure(cluster.call())
    assert 1.5 < time.monotonic() - begin < 4  # handover_timeout_s is 2
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    assert "handover_timeout_s" in error.details()
    assert all(node.starts for node in nodes)
    await until(lambda: cancels_of(first) == [True])
    assert cluster.tickets == 0


async def test_decode_queue_that_never_moves_ends_in_time(cluster: Cluster) -> None:
    first = await cluster.prefill()
    second = await cluster.decode(ignore)
    error = await failure(cluster.call())
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    await until(lambda: cancels_of(first) == [True] == cancels_of(second))


async def test_overload_marks_no_node_bad(cluster: Cluster) -> None:
    await cluster.prefill()
    second = await cluster.decode(refuse("RESOURCE_EXHAUSTED"))
    call = cluster.call(max_tokens=5)
    await until(lambda: second.starts)
    second.behave = decode
    reply = await read(call)
    assert reply.token_ids == tokens_of(3, 5)
    assert "RETRIED" not in reply.events
    assert cluster.router.members.usable(second.info.kind)
    assert (await cluster.ask(max_tokens=5)).token_ids == tokens_of(3, 5)


async def test_full_prefill_queue_makes_requests_wait_in_order(cluster: Cluster) -> None:
    running: list[Any] = []

    def two_at_most(node: ScriptedNode, start: Any) -> None:
        if len(running) == 2:
            refuse("RESOURCE_EXHAUSTED")(node, start)
        else:
            running.append(start)

    first = await cluster.prefill(two_at_most)
    await cluster.decode()
    calls = []
    for number in range(12):
        calls.append(asyncio.create_task(cluster.ask(max_tokens=2, request_id=str(number))))
        await until(lambda n=number: cluster.router.tracker.num_queued == n + 1)
    done = []
    while len(done) < 12:
        await until(lambda: running)
        start = running.pop(0)
        done.append(start.assignment.request_id)
        prefill(first, start)
    replies = await asyncio.gather(*calls)
    assert all(reply.token_ids == tokens_of(3, 2) for reply in replies)
    assert sorted(done, key=int) == [str(number) for number in range(12)]
    # Nobody hammers a full node: it is asked about once for each place that comes free.
    assert len(first.starts) < 40


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL"])
async def test_failed_pull_is_tried_on_another_decode_node_with_the_same_lease(
    cluster: Cluster, code: str
) -> None:
    refused: list[ScriptedNode] = []

    def refuse_once(node: ScriptedNode, start: Any) -> None:
        (decode if refused else refuse(code))(node, start)
        refused.append(node)

    first = await cluster.prefill()
    for _ in range(2):
        await cluster.decode(refuse_once)
    reply = await cluster.ask(max_tokens=5)
    assert reply.token_ids == tokens_of(3, 5)
    assert len(first.starts) == 1
    assert len(refused) == 2


async def test_second_failed_pull_computes_the_prompt_again(cluster: Cluster) -> None:
    first = await cluster.prefill()

    def fail_twice(node: ScriptedNode, start: Any) -> None:
        behave = refuse("UNAVAILABLE") if len(node.starts) <= 2 else decode
        behave(node, start)

    second = await cluster.decode(fail_twice)
    reply = await cluster.ask(max_tokens=5)
    assert reply.token_ids == tokens_of(3, 5)
    assert cancels_of(first) == [True, False]
    assert len(second.starts) == 3
    assert reply.events.count("RETRIED") == 1


@pytest.mark.parametrize("code", ["NOT_FOUND", "FAILED_PRECONDITION"])
async def test_lease_that_did_not_hold_computes_the_prompt_again(
    cluster: Cluster, code: str
) -> None:
    first = await cluster.prefill()

    def fail_once(node: ScriptedNode, start: Any) -> None:
        (refuse(code) if len(node.starts) == 1 else decode)(node, start)

    await cluster.decode(fail_once)
    reply = await cluster.ask(max_tokens=5)
    assert reply.token_ids == tokens_of(3, 5)
    assert len(first.starts) == 2


async def test_failure_while_decoding_goes_on_from_the_last_token(cluster: Cluster) -> None:
    await cluster.prefill()

    def fail_once(node: ScriptedNode, start: Any) -> None:
        if len(node.starts) == 1:
            decode(node, start, steps=3)
            refuse("RESOURCE_EXHAUSTED")(node, start)
        else:
            decode(node, start)

    await cluster.decode(fail_once)
    reply = await cluster.ask(max_tokens=9)
    assert reply.token_ids == tokens_of(3, 9)


async def test_what_can_never_fit_a_decode_node_is_the_clients_error(cluster: Cluster) -> None:
    first = await cluster.prefill()
    await cluster.decode(refuse("INVALID_ARGUMENT"))
    error = await failure(cluster.call())
    assert error.code() is CODE.INVALID_ARGUMENT
    await until(lambda: cancels_of(first) == [True])


async def test_late_news_of_an_earlier_attempt_are_ignored(cluster: Cluster) -> None:
    await cluster.prefill()

    def late(node: ScriptedNode, start: Any) -> None:
        if len(node.starts) == 1:
            refuse("NOT_FOUND")(node, start)
            node.tell(start.assignment.ticket, [400, 401, 402])
        else:
            decode(node, start)

    await cluster.decode(late)
    assert (await cluster.ask(max_tokens=6)).token_ids == tokens_of(3, 6)


async def test_node_that_stands_still_is_found(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.session.PING_INTERVAL_S", 0.05)
    still = await cluster.prefill(ignore)
    await cluster.decode()
    still.answers_pings = False
    error = await failure(cluster.call())
    assert "pings unanswered" in error.details()
