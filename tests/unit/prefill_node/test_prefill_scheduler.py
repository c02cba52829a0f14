"""What the prefill scheduler promises, step by step, without a model."""

from pathlib import Path

import pytest

from prefill_node.leases import Leases
from prefill_node.scheduler import PrefillScheduler
from splitserve.core.config import EngineConfig, NodeConfig
from splitserve.core.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.node import NodeKind
from splitserve.core.request import FinishReason, Request, TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.engine.batch import Batch, StepOutput
from splitserve.kv.blocks import BlockManager
from splitserve.kv.prefix import PrefixCache

EOS = 2
PARAMS = SamplingParams(max_tokens=8, seed=1)


class World:
    def __init__(self, num_blocks: int = 16, prefix_cache: bool = False, **limits: int) -> None:
        config = NodeConfig(NodeKind.PREFILL, EngineConfig(Path("unused")), **limits)
        self.blocks = BlockManager(num_blocks, block_size=4)
        self.leases = Leases(self.blocks, ttl_s=60.0)
        self.scheduler = PrefillScheduler(
            config,
            self.blocks,
            PrefixCache(self.blocks, prefix_cache),
            self.leases,
            frozenset({EOS}),
        )

    def add(
        self, name: str, length: int, indexes: tuple[int, ...] = (0,), **sampling: object
    ) -> Request:
        params = SamplingParams(**({"max_tokens": 8, "seed": 1} | sampling))
        request = Request(name, list(range(10, 10 + length)), length, params, name, indexes)
        self.scheduler.add(request)
        return request

    def step(self, token: int = 7) -> tuple[Batch, dict]:
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch, self.finish_step(batch, token)

    def finish_step(self, batch: Batch, token: int = 7) -> dict:
        samples = tuple(
            tuple(TokenLogprob(token + spec.index, 0.0) for spec in row.samples)
            for row in batch.rows
        )
        news = self.scheduler.update(batch, StepOutput(samples))
        self.blocks.check()
        self.news = news
        return {progress.ticket: progress for progress in news}


def chunks(batch: Batch) -> list[tuple[str, int, int]]:
    return [(row.key[0], row.start, len(row.token_ids)) for row in batch.rows]


def test_chunks_of_several_prompts_share_a_step_in_order_of_arrival():
    world = World(max_tokens_per_batch=10)
    for name, length in [("a", 6), ("b", 9), ("c", 3)]:
        world.add(name, length)
    assert chunks(world.step()[0]) == [("a", 0, 6), ("b", 0, 4)]
    assert chunks(world.step()[0]) == [("b", 4, 5), ("c", 0, 3)]
    assert world.scheduler.schedule() is None
    assert {"a", "b", "c"} == {ticket for ticket in "abc" if ticket in world.leases}


def test_only_the_chunk_that_ends_a_prompt_samples():
    world = World(max_tokens_per_batch=4)
    world.add("a", 10)
    samples = [world.step()[0].rows[0].samples for _ in range(3)]
    assert samples[:2] == [(), ()]
    assert [spec.position for spec in samples[2]] == [10]


def test_fault_07_leased_kv_fills_the_cache_and_no_new_prompt_starts():
    world = World(num_blocks=4)
    world.add("a", 16)
    world.step()
    world.add("b", 1)
    assert world.scheduler.schedule() is None
    assert world.blocks.counts.leased == 4
    assert world.leases.release("a", "decode") is False, "nobody had opened it"
    world.leases.cancel("a")
    assert chunks(world.step()[0]) == [("b", 0, 1)]


def test_nobody_overtakes_a_prompt_that_does_not_fit_yet():
    world = World(num_blocks=4)
    world.add("a", 12)
    world.step()
    world.add("big", 16)
    world.add("small", 2)
    assert world.scheduler.schedule() is None
    world.leases.cancel("a")
    assert chunks(world.step()[0]) == [("big", 0, 16)]


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({"max_tokens": 1}, 7, FinishReason.LENGTH),
        ({}, EOS, FinishReason.STOP),
        ({"stop_token_ids": (9,)}, 9, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, None),
    ],
)
def test_faults_27_28_an_answer_that_ends_with_its_first_token_leases_nothing(
    sampling, token, reason
):
    world = World()
    world.add("a", 5, **sampling)
    _, news = world.step(token)
    assert news["a"].finish_reason is reason
    assert ("a" in world.leases) == (reason is None)
    assert world.blocks.counts.free == (16 if reason else 14)


def test_fault_14_a_cancelled_prompt_stops_at_the_next_chunk():
    world = World(max_tokens_per_batch=4, num_blocks=100)
    world.add("long", 300)
    batch = world.scheduler.schedule()
    world.scheduler.finish(("long", 0))
    assert world.blocks.num_available == 25, "the running step still writes to its blocks"
    assert world.finish_step(batch) == {}
    assert world.blocks.num_available == 100
    assert world.scheduler.schedule() is None


def test_a_prompt_cancelled_before_it_began_is_forgotten():
    world = World()
    world.add("a", 5)
    world.scheduler.finish(("a", 0))
    assert world.scheduler.schedule() is None
    assert world.scheduler.num_waiting == 0


def test_events_say_when_prefill_began_and_ended():
    world = World(max_tokens_per_batch=4)
    world.add("a", 6)
    _, first = world.step()
    _, second = world.step()
    assert [event.kind for event in first["a"].events] == [LifetimeEventKind.PREFILL_BEGIN]
    assert [event.kind for event in second["a"].events] == [LifetimeEventKind.PREFILL_END]
    assert second["a"].token_ids == [7]


def test_the_queue_is_bounded():
    world = World(max_queued_requests=2)
    world.add("a", 1)
    world.add("b", 1)
    with pytest.raises(ResourceExhaustedError, match="max_queued_requests is 2"):
        world.add("c", 1)


@pytest.mark.parametrize("length", [0, 65])
def test_a_prompt_that_can_never_fit_is_refused(length):
    with pytest.raises(InvalidArgumentError, match="prompt tokens"):
        World().add("a", length)


def test_no_more_prompts_than_the_batch_size_share_a_step():
    world = World(max_batch_size=2)
    for name in "abc":
        world.add(name, 2)
    assert [ticket for ticket, _, _ in chunks(world.step()[0])] == ["a", "b"]
    assert [ticket for ticket, _, _ in chunks(world.step()[0])] == ["c"]


def test_several_answers_are_one_prompt_one_lease_and_a_token_each():
    world = World()
    world.add("a", 6, (0, 2, 3), n=4)
    world.step(EOS)
    assert [(p.index, p.token_ids, p.finish_reason) for p in world.news] == [
        (0, [EOS], FinishReason.STOP),
        (2, [EOS + 2], None),
        (3, [EOS + 3], None),
    ]
    assert [bool(p.events) for p in world.news] == [True, False, False]
    assert "a" in world.leases
    assert world.blocks.counts.leased == 2


def test_answers_that_all_end_with_their_first_token_lease_nothing():
    world = World()
    world.add("a", 6, (0, 1), n=2, max_tokens=1)
    world.step()
    assert {p.finish_reason for p in world.news} == {FinishReason.LENGTH}
    assert "a" not in world.leases
    assert world.blocks.num_available == 16


def test_a_prompt_begins_behind_what_an_earlier_one_has_left():
    world = World(prefix_cache=True)
    world.add("a", 11)
    world.step()
    world.leases.cancel("a")
    assert world.blocks.counts.cached == 2, "two full blocks; the third is not worth keeping"
    longer = world.add("b", 14)
    batch, _ = world.step()
    assert chunks(batch) == [("b", 8, 6)]
    assert world.news[0].cached_tokens == longer.cached == 8


def test_the_last_token_is_computed_though_all_are_cached():
    world = World(prefix_cache=True)
    for name in ("a", "b"):
        world.add(name, 8)
        batch, _ = world.step()
    assert chunks(batch) == [("b", 4, 4)]
    assert world.blocks.counts.leased == 3, "the first block twice: for both tickets"
    world.leases.cancel("a")
    assert world.blocks.counts.leased == 2
    world.leases.cancel("b")
    assert world.blocks.counts.cached == 2


def test_a_prompt_joins_the_blocks_that_a_running_one_has_filled():
    world = World(prefix_cache=True, max_tokens_per_batch=8)
    world.add("a", 20)
    world.step()
    world.add("b", 20)
    assert chunks(world.step()[0]) == [("a", 8, 8)]
    assert chunks(world.step()[0]) == [("a", 16, 4), ("b", 16, 4)]


def test_cached_blocks_give_way_the_least_recently_used_and_the_ends_of_prompts_first():
    world = World(num_blocks=6, prefix_cache=True)
    for first in (100, 200):
        request = Request("r", list(range(first, first + 12)), 12, PARAMS, str(first))
        world.scheduler.add(request)
        world.step()
        world.leases.cancel(request.ticket)
    assert world.blocks.counts.cached == 6
    world.add("c", 8)
    world.step()
    world.leases.cancel("c")
    again = {}
    for first in (100, 200):
        request = Request("r", list(range(first, first + 12)), 12, PARAMS, f"again {first}")
        world.scheduler.add(request)
        again[first] = world.step()[0].rows[0].start
        world.leases.cancel(request.ticket)
    assert again == {100: 4, 200: 4}, "c took the end of 100, and 100 then that of 200"


def test_fault_07_leased_blocks_are_never_evicted():
    world = World(num_blocks=4, prefix_cache=True)
    world.add("a", 16)
    world.step()
    world.add("b", 16)
    assert world.scheduler.schedule() is None, "b finds three of a's blocks, and none of its own"
    world.leases.cancel("a")
    assert chunks(world.step()[0]) == [("b", 12, 4)]


def test_without_a_prefix_cache_nothing_is_kept():
    world = World(prefix_cache=False)
    for name in ("a", "b"):
        world.add(name, 8)
        batch, _ = world.step()
        world.leases.cancel(name)
    assert chunks(batch) == [("b", 0, 8)]
    assert world.blocks.counts.free == 16
