"""A node of several ranks computes what one rank does, at once where it can, or not at all."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from tiny_model import write_tiny_model

from decode_node.scheduler import DecodeScheduler
from splitserve.core.config import EngineConfig
from splitserve.core.errors import InternalError, InvalidArgumentError
from splitserve.core.parallel import ParallelConfig
from splitserve.core.request import Progress, Request
from splitserve.core.sampling import SamplingParams
from splitserve.core.ticket import new_epoch
from splitserve.engine.batch import Batch, BatchRow, SampleSpec
from splitserve.engine.executor import Executor
from splitserve.engine.loop import StepLoop
from splitserve.kv.blocks import BlockManager
from splitserve.kv.handle import KvHandle
from splitserve.kv.memory import SEGMENT_DIR
from splitserve.kv.prefix import PrefixCache
from splitserve.transfer.transport import PullJob


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), layers=8, hidden=256, heads=4)


def engine(model: Path, tensor: int, pipeline: int, **options) -> EngineConfig:
    return EngineConfig(
        model,
        use_dummy_weights=True,
        num_blocks=64,
        parallel=ParallelConfig(tensor, pipeline),
        **options,
    )


def busy(trace: Path) -> list[tuple[float, float]]:
    """Begin and end of each step that a rank computed, the warm-up's two left out."""
    events = json.loads(trace.read_text().rstrip().rstrip(",") + "]")
    return [(event["ts"], event["ts"] + event["dur"]) for event in events[2:]]


def overlaps(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> int:
    return sum(a < d and c < b for a, b in ours for c, d in theirs)


@pytest.mark.asyncio
async def test_both_stages_of_a_pipeline_are_busy_at_once(tmp_path):
    # Steps of several milliseconds: shorter ones may never meet where others want the cores too.
    model = write_tiny_model(tmp_path, layers=8, hidden=768, heads=4)
    executor = await Executor.start(engine(model, 1, 2, trace_dir=tmp_path), epoch := new_epoch())
    try:
        blocks = BlockManager(64, 16)
        scheduler = DecodeScheduler(blocks, PrefixCache(blocks), frozenset(), executor.depth)
        done = asyncio.Event()
        ended: list[str] = []

        def publish(news: list[Progress]) -> None:
            ended.extend(one.ticket for one in news if one.finish_reason)
            if len(ended) == 8:
                done.set()

        for number in range(8):
            sampling = SamplingParams(max_tokens=40, seed=number, ignore_eos=True)
            request = Request("r", [number + 5], 1, sampling, f"t{number}")
            request.block_ids = blocks.allocate(3)
            scheduler.add(request)
        loop = StepLoop(executor, publish)
        steps = asyncio.create_task(loop.run(scheduler))
        await asyncio.wait_for(done.wait(), 60)
        steps.cancel()
        await asyncio.wait([steps])
        assert blocks.num_available == 64
        assert loop.sampled_tokens_total == 8 * 40
    finally:
        await executor.stop()
    first, second = (busy(tmp_path / f"{epoch}-{rank}.json") for rank in range(2))
    assert len(first) == len(second) == 80, "each half of the requests has its own steps"
    # How many depends on who else wants the cores; one step at a time would overlap nowhere.
    assert overlaps(first, second) > 0
    assert overlaps(first, first) == len(first), "a rank computes one step at a time"


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", [0, 3])
async def test_a_rank_that_dies_in_a_step_takes_all_along(model, victim):
    executor = await Executor.start(engine(model, 2, 2), new_epoch())
    pids = [worker.process.pid for worker in executor._workers]
    prompt = Batch((BatchRow(("t", 0), (7,) * 1000, 0, tuple(range(63)), ()),))
    step = asyncio.create_task(executor.execute(prompt))
    await asyncio.sleep(0)
    os.kill(pids[victim], signal.SIGKILL)
    reason = f"rank {victim} of 4.*SIGKILL"
    with pytest.raises(InternalError, match=reason):
        await asyncio.wait_for(step, 2)
    assert f"rank {victim} of 4" in await executor.wait_failed()
    await executor.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any((SEGMENT_DIR / memory.location).exists() for memory in executor.memories)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (3, 1, "tensor_parallel_size: 3.*4 attention heads"),
        (1, 9, "pipeline_parallel_size: 9.*8 layers"),
    ],
)
async def test_what_is_impossible_is_said_before_a_process_starts(model, tensor, pipeline, message):
    before = psutil.Process().children()
    with pytest.raises(InvalidArgumentError, match=message):
        await Executor.start(engine(model, tensor, pipeline), new_epoch())
    assert psutil.Process().children() == before


@pytest.mark.asyncio
async def test_a_rank_that_cannot_start_fails_the_start_as_a_whole(model):
    before = psutil.Process().children()
    with pytest.raises(InvalidArgumentError, match="trace_dir"):
        await Executor.start(engine(model, 2, 1, trace_dir=Path("/proc/none")), new_epoch())
    assert psutil.Process().children() == before


@pytest.mark.asyncio
async def test_fault_11_a_pull_is_over_only_when_every_rank_has_its_part(model):
    source = await Executor.start(engine(model, 1, 1), new_epoch())
    target = await Executor.start(engine(model, 1, 2), new_epoch())
    try:
        spec = SampleSpec(SamplingParams(seed=3, logprobs=0), 40)
        prompt = Batch((BatchRow(("t", 0), tuple(range(40)), 0, (4, 9, 2), (spec,)),))
        first = (await source.execute(prompt)).samples[0][0]
        slow = psutil.Process(target._workers[1].process.pid)
        slow.suspend()
        async with asyncio.timeout(10):
            while slow.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        job = PullJob(KvHandle("shm", 40, (4, 9, 2), source.memories), (1, 0, 5))
        pull = asyncio.create_task(target.pull(job))
        await asyncio.sleep(0)
        [fast_pull] = target._workers[0]._calls.values()
        await asyncio.wait_for(fast_pull, 10)
        assert not pull.done(), "one rank has its part, the other has not"
        slow.resume()
        result = await pull
        assert result.size_bytes == 40 * sum(m.layout.token_bytes for m in source.memories)

        def token(blocks: tuple[int, ...]) -> Batch:
            spec = SampleSpec(SamplingParams(seed=3, logprobs=0), 41)
            return Batch((BatchRow(("t", 0), (first.token_id,), 40, blocks, (spec,)),))

        here, there = await source.execute(token((4, 9, 2))), await target.execute(token((1, 0, 5)))
        assert here.samples[0][0].token_id == there.samples[0][0].token_id
        assert here.samples[0][0].logprob == pytest.approx(there.samples[0][0].logprob, abs=1e-4)
    finally:
        await target.stop()
        await source.stop()
