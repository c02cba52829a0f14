"""Several answers to one request: one prompt, one hand-over, and an end for each."""

import asyncio
from collections import defaultdict
from typing import Any

import grpc
from scripted_cluster import Cluster, Reply, read
from scripted_node import ScriptedNode, decode, prefill, tokens_of, until

from splitserve.core.lifetime import LifetimeEventKind as Kind
from splitserve.core.node import NodeKind
from splitserve.core.request import FinishReason
from splitserve.v1 import work_pb2

STOP, LENGTH, ABORTED = 1, 2, 3


def tokens(reply: Reply) -> list[list[int]]:
    """Each answer's."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for message in reply.messages:
        found[message.index] += message.token_ids
    return [found[index] for index in sorted(found)]


def ends(reply: Reply) -> dict[int, int]:
    """Why each answer ended; fails if one ended twice."""
    told = [(m.index, m.finish_reason) for m in reply.messages if m.finish_reason]
    assert len(dict(told)) == len(told)
    return dict(told)


async def test_answers_come_of_one_prompt_and_one_pull(cluster: Cluster) -> None:
    first, second = await cluster.prefill(), await cluster.decode()
    reply = await cluster.ask(max_tokens=20, n=3)
    assert tokens(reply) == [tokens_of(3, 20, index) for index in range(3)]
    assert ends(reply) == {0: LENGTH, 1: LENGTH, 2: LENGTH}
    assert (len(first.starts), len(second.starts)) == (1, 1)
    assert list(second.starts[0].next_token_ids) == [tokens_of(3, 1, i)[0] for i in range(3)]
    assert reply.last.usage.completion_tokens == 60
    assert not any(message.HasField("usage") for message in reply.messages[:-1])
    for kind in ("PREFILL_END", "DECODE_BEGIN", "DECODE_END", "FINISHED"):
        assert reply.events.count(kind) == 1
    assert not first.cancels
    assert not second.cancels
    assert cluster.tickets == 0


async def test_only_answers_that_go_on_are_handed_over(cluster: Cluster) -> None:
    def second_ends(node: ScriptedNode, start: Any) -> None:
        ticket = start.assignment.ticket
        node.tell(ticket, tokens_of(3, 1, 0), [Kind.PREFILL_BEGIN, Kind.PREFILL_END])
        node.tell(ticket, [2], index=1, finish_reason=STOP)
        node.tell(ticket, tokens_of(3, 1, 2), index=2)

    await cluster.prefill(second_ends)
    second = await cluster.decode()
    reply = await cluster.ask(max_tokens=5, n=3)
    assert list(second.starts[0].assignment.indexes) == [0, 2]
    assert tokens(reply) == [tokens_of(3, 5, 0), [2], tokens_of(3, 5, 2)]
    assert ends(reply) == {0: LENGTH, 1: STOP, 2: LENGTH}


async def test_answers_that_all_end_at_once_need_no_decode_node(cluster: Cluster) -> None:
    first, second = await cluster.prefill(), await cluster.decode()
    reply = await cluster.ask(max_tokens=1, n=2)
    assert ends(reply) == {0: LENGTH, 1: LENGTH}
    assert not second.starts
    assert not first.cancels


async def test_a_stop_string_ends_its_answer_alone_and_the_node_hears(cluster: Cluster) -> None:
    def slowly(node: ScriptedNode, start: Any) -> None:
        decode(node, start, steps=12)

    await cluster.prefill()
    second = await cluster.decode(slowly)
    text = cluster.router.members.model.tokenizer.decode(tokens_of(3, 12, 1))
    call = cluster.call(max_tokens=14, n=2, stop=[text[3:12]])
    reply = Reply()
    while 1 not in ends(reply):
        reply.messages.append(await call.read())
    await until(lambda: second.cancelled_answers == [1])
    ticket = second.starts[0].assignment.ticket
    second.tell(ticket, [400], [Kind.DECODE_END], index=1, finish_reason=LENGTH)  # Too late.
    second.tell(ticket, [401], [Kind.DECODE_END], finish_reason=LENGTH)
    while (message := await call.read()) is not grpc.aio.EOF:
        reply.messages.append(message)
    assert ends(reply) == {0: LENGTH, 1: STOP}
    assert 400 not in tokens(reply)[1]
    assert tokens(reply)[0][-1] == 401
    assert reply.events.count("DECODE_END") == 1
    assert not second.cancels


async def test_after_a_failure_each_answer_goes_on_by_itself(cluster: Cluster) -> None:
    first = await cluster.prefill()

    def uneven(node: ScriptedNode, start: Any) -> None:
        if len(node.starts) > 1:
            decode(node, start)
            return
        ticket = start.assignment.ticket
        node.tell(ticket, tokens_of(4, 3, 0), [Kind.MIGRATION_END, Kind.DECODE_BEGIN])
        node.tell(ticket, tokens_of(4, 9, 1), index=1, finish_reason=LENGTH)
        node.tell(ticket, error=("INTERNAL", "as the test says"))

    second = await cluster.decode(uneven)
    reply = await cluster.ask(max_tokens=10, n=4)
    assert tokens(reply) == [tokens_of(3, 10, index) for index in range(4)]
    again = [list(start.assignment.indexes) for start in second.starts[1:]]
    assert sorted(again) == [[0], [2], [3]]
    assert {tuple(s.assignment.token_ids[3:]) for s in first.starts[1:]} == {
        tuple(tokens_of(3, 4, 0)),
        tuple(tokens_of(3, 1, 2)),
        tuple(tokens_of(3, 1, 3)),
    }
    assert cluster.tickets == 0


async def test_an_answer_that_ends_as_its_node_is_lost_leaves_the_others_alone(
    cluster: Cluster,
) -> None:
    def fail_once(node: ScriptedNode, start: Any) -> None:
        if len(node.starts) == 1:
            ticket = start.assignment.ticket
            node.tell(ticket, tokens_of(4, 1, 0), [Kind.MIGRATION_END, Kind.DECODE_BEGIN])
            node.tell(ticket, error=("INTERNAL", "as the test says"))

    await cluster.prefill()
    second = await cluster.decode(fail_once)
    call = cluster.call(max_tokens=4, n=2)
    reader = asyncio.create_task(read(call))
    await until(lambda: len(second.starts) == 3)  # Each by itself, and being pulled.
    by_index = {tuple(start.assignment.indexes): start for start in second.starts[1:]}
    ticket = by_index[(0,)].assignment.ticket
    sessions = {one.info.kind: one for one in cluster.router.members.sessions}
    # In one turn of the loop: the prefill node's stream breaks, and the decode node has the end.
    lost = sessions[NodeKind.PREFILL].attempts.by_ticket.pop(ticket)
    lost.holder.on_lost(lost, "as the test says")
    end = work_pb2.Progress(ticket=ticket, token_ids=tokens_of(6, 1), finish_reason=LENGTH)
    sessions[NodeKind.DECODE]._deliver([end])
    decode(second, by_index[(1,)])
    reply = await reader
    assert tokens(reply) == [tokens_of(3, 4, index) for index in range(2)]
    assert ends(reply) == {0: LENGTH, 1: LENGTH}


async def test_a_prompt_lost_before_its_tokens_is_computed_once_for_all(cluster: Cluster) -> None:
    def fail_once(node: ScriptedNode, start: Any) -> None:
        if len(node.starts) == 1:
            node.tell(start.assignment.ticket, error=("INTERNAL", "as the test says"))
        else:
            prefill(node, start)

    first = await cluster.prefill(fail_once)
    await cluster.decode()
    reply = await cluster.ask(max_tokens=4, n=3)
    assert tokens(reply) == [tokens_of(3, 4, index) for index in range(3)]
    assert len(first.starts) == 2


async def test_abort_ends_the_answers_that_are_left(cluster: Cluster) -> None:
    await cluster.prefill()

    def one_ends(node: ScriptedNode, start: Any) -> None:
        node.tell(start.assignment.ticket, [9], [Kind.DECODE_BEGIN], finish_reason=LENGTH)

    second = await cluster.decode(one_ends)
    call = cluster.call(max_tokens=9, n=2, request_id="r")
    reply = Reply()
    while 0 not in ends(reply):
        reply.messages.append(await call.read())
    cluster.router.tracker.get("r").finish(FinishReason.ABORTED)
    while (message := await call.read()) is not grpc.aio.EOF:
        reply.messages.append(message)
    assert ends(reply) == {0: LENGTH, 1: ABORTED}
    await until(lambda: second.cancels)
