"""What the import queue promises: bounded, in order, and every block back on every way out."""

import asyncio
from pathlib import Path

import pytest

from decode_node.imports import Import, ImportQueue, Source
from decode_node.scheduler import DecodeScheduler
from splitserve.core.config import EngineConfig, NodeConfig
from splitserve.core.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from splitserve.core.lifetime import KvTransfer, LifetimeEventKind
from splitserve.core.node import NodeKind
from splitserve.core.request import FinishReason, Progress, Request, TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.engine.batch import StepOutput
from splitserve.kv.blocks import BlockManager
from splitserve.kv.prefix import PrefixCache

SOURCE = Source("127.0.0.1:1", "epoch")
EOS = 2


class World:
    """A decode node without model and network: pulls end when the test says so."""

    def __init__(self, num_blocks: int = 8, prefix_cache: bool = False, **limits: int) -> None:
        config = NodeConfig(NodeKind.DECODE, EngineConfig(Path("unused")), **limits)
        self.blocks = BlockManager(num_blocks, block_size=4)
        prefixes = PrefixCache(self.blocks, prefix_cache)
        self.scheduler = DecodeScheduler(self.blocks, prefixes, frozenset({EOS}))
        self.news: list[Progress] = []
        self.pulls: dict[str, asyncio.Future[None]] = {}
        self.queue = ImportQueue(
            config,
            self.blocks,
            prefixes,
            lambda: self.scheduler.num_running,
            self._pull,
            self.scheduler.add,
            self.news.extend,
        )
        self.blocks.on_free = self.queue.admit

    async def _pull(self, item: Import) -> KvTransfer:
        done = self.pulls[item.ticket] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            # As the executor does: the copy runs to its end before anybody may free the blocks.
            await done
            raise
        return KvTransfer("test", 1, 1)

    def submit(
        self, name: str, prompt: int = 4, max_tokens: int = 4, n: int = 1, early: bool = False
    ) -> Import:
        params = SamplingParams(max_tokens=max_tokens, seed=1, n=n)
        tokens = range(10, 10 + prompt + (not early))
        answers = [
            Request(name, list(tokens), prompt, params, ticket=name, indexes=(index,))
            for index in range(n)
        ]
        item = Import(answers, SOURCE, prompt, early)
        self.queue.submit(item)
        return item

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        self.blocks.check()

    async def finish_pull(self, name: str) -> None:
        self.pulls.pop(name).set_result(None)
        await self.settle()

    def step(self, token: int = 7) -> dict[str, Progress]:
        batch = self.scheduler.schedule()
        assert batch is not None
        output = StepOutput(tuple((TokenLogprob(token, 0.0),) for _ in batch.rows))
        return {p.ticket: p for p in self.scheduler.update(batch, output)}


@pytest.fixture
async def make_world():
    """Makes worlds, and lets every pull end when the test is over."""
    worlds: list[World] = []

    def make(*args: int, **limits: int) -> World:
        worlds.append(World(*args, **limits))
        return worlds[-1]

    yield make
    for world in worlds:
        for done in world.pulls.values():
            if not done.done():
                done.set_result(None)
        await world.queue.close()
        await world.settle()


async def test_admission_reserves_for_growth_so_nothing_runs_out(make_world):
    world = make_world(num_blocks=8)
    world.submit("a", prompt=4, max_tokens=13)
    await world.settle()
    assert world.blocks.counts.owned == 5, "17 tokens of prompt and answer, 4 in a block"
    await world.finish_pull("a")
    for _ in range(11):
        assert world.step()["a"].finish_reason is None
    assert world.step()["a"].finish_reason is FinishReason.LENGTH
    assert world.blocks.num_available == 8


async def test_a_request_that_does_not_fit_waits_and_nobody_overtakes_it(make_world):
    world = make_world(num_blocks=4)
    world.submit("a", prompt=8, max_tokens=4)
    world.submit("big", prompt=8, max_tokens=8)
    world.submit("small", prompt=2, max_tokens=2)
    await world.settle()
    assert list(world.pulls) == ["a"]
    await world.finish_pull("a")
    world.scheduler.finish(("a", 0))
    await world.settle()
    assert list(world.pulls) == ["big"]
    await world.finish_pull("big")
    assert world.queue.num_waiting == 1


async def test_pulls_at_once_are_bounded(make_world):
    world = make_world(num_blocks=8, max_concurrent_pulls=2)
    for name in "abc":
        world.submit(name)
    await world.settle()
    assert list(world.pulls) == ["a", "b"]
    await world.finish_pull("b")
    assert list(world.pulls) == ["a", "c"]


async def test_a_place_in_the_batch_is_reserved_with_the_blocks(make_world):
    world = make_world(max_batch_size=1)
    world.submit("a")
    world.submit("b")
    await world.settle()
    assert list(world.pulls) == ["a"]
    await world.finish_pull("a")
    assert not world.pulls
    assert world.step(EOS)["a"].finish_reason is FinishReason.STOP
    await world.settle()
    assert list(world.pulls) == ["b"]


async def test_the_queue_is_bounded(make_world):
    world = make_world(num_blocks=2, max_queued_requests=1)
    world.submit("running")
    world.submit("waiting")
    with pytest.raises(ResourceExhaustedError, match="max_queued_requests is 1"):
        world.submit("refused")


async def test_a_request_that_can_never_fit_is_refused(make_world):
    with pytest.raises(InvalidArgumentError, match="at most 32 here"):
        make_world(num_blocks=8).submit("a", prompt=4, max_tokens=29)


async def test_fault_04_blocks_being_written_come_back_only_after_the_copy(make_world):
    world = make_world(num_blocks=2)
    world.submit("a")
    world.submit("b")
    await world.settle()
    world.queue.cancel("a", {0})
    await world.settle()
    assert world.blocks.num_available == 0, "the copy into a's blocks still runs"
    assert list(world.pulls) == ["a"]
    await world.finish_pull("a")
    assert list(world.pulls) == ["b"]
    assert not world.news, "a cancelled request has no news"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (FailedPreconditionError("lease: it ended"), FailedPreconditionError),
        (RuntimeError("secret detail"), InternalError),
    ],
)
async def test_fault_22_a_failed_pull_is_told_and_its_blocks_come_back(make_world, raised, told):
    world = make_world()
    world.submit("a")
    await world.settle()
    world.pulls.pop("a").set_exception(raised)
    await world.settle()
    assert isinstance(world.news[0].error, told)
    assert "secret" not in str(world.news[0].error)
    assert world.blocks.num_available == 8
    assert world.queue.num_importing == 0


async def test_events_tell_the_migration_and_how_the_kv_moved(make_world):
    world = make_world()
    world.submit("a")
    await world.settle()
    await world.finish_pull("a")
    kinds = [event.kind for event in world.step()["a"].events]
    assert kinds == [
        LifetimeEventKind.MIGRATION_BEGIN,
        LifetimeEventKind.MIGRATION_END,
        LifetimeEventKind.DECODE_BEGIN,
    ]


async def test_a_pull_cancelled_before_its_first_step_gives_all_back(make_world):
    world = make_world(num_blocks=8)
    world.submit("runs", max_tokens=8)
    await world.settle()
    await world.finish_pull("runs")
    world.submit("big", prompt=6, n=3)
    world.submit("behind")
    await world.settle()
    assert world.queue.num_waiting == 2
    # A router leaves. With the first of its requests gone there is room for the one behind it,
    # which begins and is cancelled in the same turn of the loop.
    world.queue.cancel("big", {0, 1, 2})
    assert world.queue.num_importing == 1
    world.queue.cancel("behind", {0})
    world.scheduler.finish(("runs", 0))
    await world.settle()
    assert world.queue.num_importing == world.queue.num_waiting == 0
    assert world.blocks.num_available == 8


async def test_a_ticket_whose_cancelled_pull_goes_on_is_refused_until_it_is_over(make_world):
    world = make_world()
    world.submit("a")
    await world.settle()
    world.queue.cancel("a", {0})
    with pytest.raises(UnavailableError, match="earlier pull"):
        world.submit("a")
    await world.finish_pull("a")
    world.submit("a")
    await world.settle()
    assert world.queue.num_importing == 1


async def test_close_ends_every_pull_and_frees_its_blocks(make_world):
    world = make_world()
    world.submit("a")
    await world.settle()
    closing = asyncio.create_task(world.queue.close())
    await world.settle()
    assert not closing.done(), "a copy still runs"
    await world.finish_pull("a")
    await closing
    assert world.queue.num_importing == 0
    assert world.blocks.num_available == 8


async def test_a_request_dropped_during_a_step_keeps_its_blocks_until_the_step_is_over(make_world):
    world = make_world()
    world.submit("a")
    await world.settle()
    await world.finish_pull("a")
    batch = world.scheduler.schedule()
    world.scheduler.finish(("a", 0))
    assert world.blocks.num_available == 6
    assert world.scheduler.update(batch, StepOutput(((TokenLogprob(7, 0.0),),))) == []
    assert world.blocks.num_available == 8


async def test_answers_share_full_blocks_and_copy_the_last_one(make_world):
    world = make_world(num_blocks=16)
    item = world.submit("a", prompt=6, max_tokens=4, n=3)
    await world.settle()
    assert world.blocks.counts.owned == 1 + 3 * 2, "one full block, and two for each answer"
    first, *others = (answer.block_ids for answer in item.answers)
    assert item.block_ids == tuple(first[:2])
    assert item.copies == tuple((first[1], other[1]) for other in others)
    assert {blocks[0] for blocks in (first, *others)} == {first[0]}
    await world.finish_pull("a")
    assert world.scheduler.num_running == 3
    for index in range(3):
        assert world.blocks.num_available == 16 - 7 + 2 * index
        world.scheduler.finish(("a", index))
    await world.settle()
    assert world.blocks.num_available == 16


async def test_a_prompt_of_full_blocks_needs_no_copy(make_world):
    world = make_world(num_blocks=16)
    item = world.submit("a", prompt=8, max_tokens=4, n=2)
    await world.settle()
    assert (len(item.block_ids), item.copies) == (2, ())
    await world.finish_pull("a")


async def test_an_answer_cancelled_in_mid_pull_gives_its_own_blocks_back_after_it(make_world):
    world = make_world(num_blocks=16)
    world.submit("a", prompt=6, max_tokens=4, n=3)
    await world.settle()
    world.queue.cancel("a", {0, 2})
    await world.settle()
    assert world.blocks.counts.owned == 7
    await world.finish_pull("a")
    assert world.scheduler.num_running == 1
    assert world.blocks.counts.owned == 3
    assert list(world.step()) == ["a"]
    world.scheduler.finish(("a", 1))
    assert world.blocks.num_available == 16


async def test_a_failed_pull_of_several_answers_is_told_once(make_world):
    world = make_world(num_blocks=16)
    world.submit("a", prompt=6, n=3)
    await world.settle()
    world.pulls.pop("a").set_exception(FailedPreconditionError("lease: it ended"))
    await world.settle()
    assert len(world.news) == 1
    assert world.blocks.num_available == 16


@pytest.mark.parametrize(("n", "says"), [(3, "max_batch_size|at most 2"), (2, "4 blocks")])
async def test_more_answers_than_can_ever_fit_are_refused_by_name(make_world, n, says):
    world = make_world(num_blocks=4, max_batch_size=2)
    with pytest.raises(InvalidArgumentError, match=f"n: {n}.*({says})"):
        world.submit("a", prompt=4, max_tokens=8, n=n)


async def test_what_an_earlier_request_left_is_not_pulled_again(make_world):
    world = make_world(prefix_cache=True)
    world.submit("a", prompt=10, max_tokens=4)
    await world.settle()
    await world.finish_pull("a")
    while not world.step()["a"].finish_reason:
        pass
    assert world.blocks.counts.cached == 3, "13 tokens have KV: three full blocks"
    item = world.submit("b", prompt=9, max_tokens=4)
    await world.settle()
    assert item.cached_tokens == 8
    assert world.blocks.counts.cached == 1
    await world.finish_pull("b")
    assert world.scheduler.num_running == 1


async def test_fault_08_a_request_whose_kv_is_all_there_goes_through_the_hand_over_too(make_world):
    world = make_world(prefix_cache=True)
    for name in ("a", "b"):
        item = world.submit(name, prompt=8)
        await world.settle()
        assert list(world.pulls) == [name], "the lease is opened and released in any case"
        await world.finish_pull(name)
        world.scheduler.finish((name, 0))
    assert item.cached_tokens == 8
    await world.settle()
    assert world.blocks.num_available == 8


async def test_answers_share_what_was_found_and_give_it_back_once_each(make_world):
    world = make_world(num_blocks=16, prefix_cache=True)
    world.submit("a", prompt=9)
    await world.settle()
    await world.finish_pull("a")
    item = world.submit("b", prompt=9, n=3)
    await world.settle()
    assert item.cached_tokens == 8
    assert len({tuple(answer.block_ids[:2]) for answer in item.answers}) == 1
    world.pulls.pop("b").set_exception(FailedPreconditionError("lease: it ended"))
    await world.settle()
    assert world.blocks.counts.owned == 4, "a still runs"
    world.scheduler.finish(("a", 0))
    assert world.blocks.num_available == 16


async def test_kv_of_a_pull_that_failed_is_never_found(make_world):
    world = make_world(prefix_cache=True)
    world.submit("a", prompt=8)
    await world.settle()
    world.pulls.pop("a").set_exception(FailedPreconditionError("lease: it ended"))
    await world.settle()
    assert world.blocks.counts.cached == 0
    assert world.submit("b", prompt=8).cached_tokens == 0


async def test_an_early_pull_waits_for_its_tokens_and_then_runs(make_world):
    world = make_world(num_blocks=16)
    item = world.submit("a", prompt=6, n=3, early=True)
    await world.settle()
    await world.finish_pull("a")
    assert world.scheduler.num_running == 0
    assert world.queue.num_importing == 1
    world.queue.first_tokens("a", {0: 7, 2: 8})
    assert world.queue.num_importing == 0
    assert [answer.token_ids[-1] for answer in item.answers] == [7, 15, 8]
    assert world.scheduler.num_running == 2
    kinds = [event.kind for event in item.answers[0].events]
    assert kinds == [
        LifetimeEventKind.MIGRATION_BEGIN,
        LifetimeEventKind.MIGRATION_END,
        LifetimeEventKind.DECODE_BEGIN,
    ]


async def test_tokens_that_come_before_the_early_pull_is_over_wait_for_it(make_world):
    world = make_world()
    world.submit("a", early=True)
    await world.settle()
    world.queue.first_tokens("a", {0: 7})
    assert world.scheduler.num_running == 0
    await world.finish_pull("a")
    assert world.scheduler.num_running == 1


async def test_an_early_pull_has_no_place_in_the_queue(make_world):
    world = make_world(num_blocks=4)
    world.submit("a", prompt=8, max_tokens=4)
    with pytest.raises(ResourceExhaustedError, match="still computed"):
        world.submit("early", early=True)
    await world.settle()
    assert world.blocks.counts.owned == 3
    await world.finish_pull("a")


async def test_early_pulls_take_no_place_from_others_and_are_bounded(make_world):
    world = make_world(num_blocks=16, max_concurrent_pulls=1)
    world.submit("early", early=True)
    with pytest.raises(ResourceExhaustedError):
        world.submit("another", early=True)
    world.submit("a")
    await world.settle()
    assert set(world.pulls) == {"early", "a"}


@pytest.mark.parametrize("pulled", [True, False])
async def test_an_early_pull_that_is_not_wanted_any_more_gives_its_blocks_back(make_world, pulled):
    world = make_world()
    world.submit("a", n=2, early=True)
    await world.settle()
    if pulled:
        await world.finish_pull("a")
    world.queue.cancel("a", {0, 1})
    if not pulled:
        assert world.blocks.num_available < 8, "the copy may still write"
        await world.finish_pull("a")
    assert world.queue.num_importing == 0
    assert world.blocks.num_available == 8
    world.queue.first_tokens("a", {0: 7})
    assert world.scheduler.num_running == 0


async def test_an_early_pull_that_fails_is_told(make_world):
    world = make_world()
    world.submit("a", early=True)
    await world.settle()
    world.pulls.pop("a").set_exception(FailedPreconditionError("lease: it ended"))
    await world.settle()
    assert [progress.error.code for progress in world.news] == ["FAILED_PRECONDITION"]
    assert world.blocks.num_available == 8
