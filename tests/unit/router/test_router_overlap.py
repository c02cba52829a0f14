"""A prompt of several steps is pulled while it is computed, and nothing else changes."""

from dataclasses import replace
from typing import Any

import pytest
from scripted_cluster import Cluster
from scripted_node import ScriptedNode, decode, ignore, prefill, refuse, tokens_of, until

from splitserve.core.config import RouterConfig
from splitserve.core.lifetime import LifetimeEventKind as Kind

PROMPT = list(range(30, 130))


def in_chunks(node: ScriptedNode, start: Any) -> None:
    """A first chunk; `go_on` does the rest."""
    node.tell(start.assignment.ticket, events=[Kind.PREFILL_BEGIN])


async def pulled_early(first: ScriptedNode, second: ScriptedNode) -> str:
    await until(lambda: first.starts and second.starts)
    [early] = second.starts
    assert early.assignment.ticket == first.starts[0].assignment.ticket
    assert list(early.assignment.token_ids) == PROMPT
    assert early.source_address == first.info.address
    assert not early.next_token_ids
    return early.assignment.ticket


async def test_a_decode_node_hears_of_the_prompt_early_and_of_its_tokens_when_they_are_there(
    cluster: Cluster,
) -> None:
    first, second = await cluster.prefill(in_chunks), await cluster.decode()
    call = cluster.call(PROMPT, max_tokens=5, n=2)
    ticket = await pulled_early(first, second)
    in_chunks(first, first.starts[0])  # More chunks change nothing.
    prefill(first, first.starts[0])
    reply = [message async for message in call]
    assert [list(told.next_token_ids) for told in second.first_tokens] == [
        [tokens_of(100, 1, index)[0] for index in range(2)]
    ]
    assert second.first_tokens[0].ticket == ticket
    assert len(second.starts) == 1
    for index in range(2):
        tokens = [t for m in reply if m.index == index for t in m.token_ids]
        assert tokens == tokens_of(100, 5, index)
    assert not first.cancels + second.cancels
    assert cluster.tickets == 0


async def test_only_the_answers_that_go_on_are_told(cluster: Cluster) -> None:
    first, second = await cluster.prefill(in_chunks), await cluster.decode()
    call = cluster.call(PROMPT, max_tokens=3, n=2)
    ticket = await pulled_early(first, second)
    first.tell(ticket, [9], [Kind.PREFILL_END], finish_reason=1)
    first.tell(ticket, tokens_of(100, 1, 1), index=1)
    reply = [message async for message in call]
    assert list(second.first_tokens[0].indexes) == [1]
    assert {m.index: m.finish_reason for m in reply if m.finish_reason} == {0: 1, 1: 2}
    assert cluster.tickets == 0


async def test_an_answer_that_ends_with_its_first_token_lets_the_early_pull_go(
    cluster: Cluster,
) -> None:
    first, second = await cluster.prefill(in_chunks), await cluster.decode()
    call = cluster.call(PROMPT, max_tokens=5)
    ticket = await pulled_early(first, second)
    first.tell(ticket, [9], [Kind.PREFILL_END], finish_reason=1)
    assert [message async for message in call]
    await until(lambda: second.cancels == [ticket])
    assert cluster.tickets == 0


async def test_a_client_that_leaves_lets_both_nodes_go(cluster: Cluster) -> None:
    first, second = await cluster.prefill(in_chunks), await cluster.decode()
    call = cluster.call(PROMPT, max_tokens=5)
    ticket = await pulled_early(first, second)
    call.cancel()
    await until(lambda: first.cancels == second.cancels == [ticket])
    assert cluster.tickets == 0


@pytest.mark.parametrize("how", ["refused", "failed", "lost"])
async def test_an_early_pull_that_comes_to_nothing_costs_nothing(
    cluster: Cluster, how: str
) -> None:
    def behave(node: ScriptedNode, start: Any) -> None:
        if start.next_token_ids:
            decode(node, start)
        elif how == "refused":
            refuse("RESOURCE_EXHAUSTED")(node, start)
        elif how == "failed":
            refuse("UNAVAILABLE")(node, start)

    first, second = await cluster.prefill(in_chunks), await cluster.decode(behave)
    call = cluster.call(PROMPT, max_tokens=5)
    await pulled_early(first, second)
    if how == "lost":
        second.break_stream()
    await until(lambda: cluster.tickets == 1)
    third = await cluster.decode() if how == "lost" else second
    prefill(first, first.starts[0])
    reply = [message async for message in call]
    assert [t for m in reply for t in m.token_ids] == tokens_of(100, 5)
    assert third.starts[-1].next_token_ids
    assert not third.first_tokens
    events = [event.kind for event in reply[-1].lifetime.events]
    assert Kind.RETRIED.value not in events
    assert cluster.tickets == 0


async def test_a_prompt_of_one_step_is_not_pulled_early(cluster: Cluster) -> None:
    await cluster.prefill()
    second = await cluster.decode()
    await cluster.ask(PROMPT, max_tokens=5)
    assert [bool(start.next_token_ids) for start in second.starts] == [True]


async def test_a_lost_prefill_node_takes_its_early_pull_along(cluster: Cluster) -> None:
    first, second = await cluster.prefill(in_chunks), await cluster.decode()
    call = cluster.call(PROMPT, max_tokens=5)
    ticket = await pulled_early(first, second)
    other = await cluster.prefill()
    first.break_stream()
    reply = [message async for message in call]
    assert [t for m in reply for t in m.token_ids] == tokens_of(100, 5)
    assert second.cancels == [ticket]
    assert len(other.starts) == 1
    assert cluster.tickets == 0


class TestTurnedOff:
    @pytest.fixture
    def config(self, config: RouterConfig) -> RouterConfig:
        return replace(config, overlapped_pull=False)

    async def test_nothing_is_pulled_early(self, cluster: Cluster) -> None:
        first, second = await cluster.prefill(in_chunks), await cluster.decode(ignore)
        call = cluster.call(PROMPT, max_tokens=5)
        await until(lambda: first.starts)
        prefill(first, first.starts[0])
        await until(lambda: second.starts)
        assert second.starts[0].next_token_ids
        call.cancel()
