import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from tiny_model import write_tiny_model

from splitserve.core.config import EngineConfig
from splitserve.core.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from splitserve.core.sampling import SamplingParams
from splitserve.core.ticket import new_epoch
from splitserve.engine import executor as executor_module
from splitserve.engine.batch import Batch, BatchRow, SampleSpec
from splitserve.engine.executor import Executor
from splitserve.kv.cache import KVCache
from splitserve.kv.handle import KvHandle
from splitserve.kv.memory import SEGMENT_DIR, segment_name
from splitserve.transfer.transport import PullJob

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = tuple(range(10, 50))
LONG_STEP = Batch((BatchRow(("long", 0), (7,) * 16_000, 0, tuple(range(1000)), ()),))
"""Seconds of work even on a fast machine."""


def workers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "splitserve.engine.worker" in child.cmdline()
    ]


def suspend(pid: int) -> psutil.Process:
    process = psutil.Process(pid)
    process.suspend()
    os.waitid(os.P_PID, pid, os.WSTOPPED)  # All its threads.
    return process


def spec(position: int) -> SampleSpec:
    return SampleSpec(SamplingParams(seed=11, logprobs=3), position)


def prompt(block_ids: tuple[int, ...], tokens: tuple[int, ...] = PROMPT) -> Batch:
    return Batch((BatchRow(("t", 0), tokens, 0, block_ids, (spec(len(tokens)),)),))


def next_token(token: int, block_ids: tuple[int, ...], position: int = len(PROMPT)) -> Batch:
    return Batch((BatchRow(("t", 0), (token,), position, block_ids, (spec(position + 1),)),))


def handle(source: Executor, block_ids: tuple[int, ...], tokens: int = len(PROMPT)) -> KvHandle:
    return KvHandle(source.transport, tokens, block_ids, source.memories)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def config(model) -> EngineConfig:
    return EngineConfig(model, use_dummy_weights=True, num_blocks=1024)


async def run(config: EngineConfig) -> AsyncIterator[Executor]:
    executor = await Executor.start(config, new_epoch())
    pid = executor._workers[0].process.pid
    yield executor
    await executor.stop()
    assert not psutil.pid_exists(pid), "a stopped worker is gone"
    assert not (SEGMENT_DIR / executor.memories[0].location).exists(), "its memory too"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def source(config):
    async for executor in run(config):
        yield executor


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def target(config):
    async for executor in run(replace(config, block_size=32, num_blocks=512)):
        yield executor


@pytest_asyncio.fixture(loop_scope="module")
async def doomed(config):
    """One to break."""
    async for executor in run(config):
        yield executor


async def test_an_executor_says_what_it_has_become(source, target):
    assert source.shape.num_blocks == 1024
    assert source.shape.max_model_len == 1024 * 16, "as much as the blocks hold"
    assert target.shape.max_model_len == 512 * 32
    assert (source.shape.model.vocab_size, source.shape.model.eos_token_ids) == (
        512,
        frozenset({2}),
    )
    assert (source.shape.dtype, source.transport) == ("float32", "shm")
    assert source.memories[0].layout.block_size == 16


async def test_prompt_in_chunks_and_in_one_step_give_the_same_token(source):
    whole = (await source.execute(prompt((1, 2, 3)))).samples[0][0]
    first = Batch((BatchRow(("t", 0), PROMPT[:17], 0, (4, 5), ()),))
    assert (await source.execute(first)).samples == ((),)
    rest = Batch((BatchRow(("t", 0), PROMPT[17:], 17, (4, 5, 6), (spec(len(PROMPT)),)),))
    chunked = (await source.execute(rest)).samples[0][0]
    assert chunked.token_id == whole.token_id
    assert chunked.logprob == pytest.approx(whole.logprob, abs=1e-4)


async def test_a_pulled_request_goes_on_as_if_it_had_stayed(source, target):
    token = (await source.execute(prompt((9, 4, 7)))).samples[0][0].token_id
    result = await target.pull(PullJob(handle(source, (9, 4, 7)), (5, 3)))
    assert result.size_bytes == len(PROMPT) * source.memories[0].layout.token_bytes
    assert result.duration_ns > 0
    stayed = (await source.execute(next_token(token, (9, 4, 7)))).samples[0][0]
    moved = (await target.execute(next_token(token, (5, 3)))).samples[0][0]
    assert moved.token_id == stayed.token_id
    assert moved.logprob == pytest.approx(stayed.logprob, abs=1e-4)


async def test_pulls_at_once_are_each_their_own(source, target):
    await source.execute(prompt((1, 2, 3)))
    await source.execute(prompt((4, 5, 6), PROMPT[::-1]))
    jobs = [PullJob(handle(source, ids), ids[:2]) for ids in ((1, 2, 3), (4, 5, 6))]
    await asyncio.gather(*(target.pull(job) for job in jobs))
    theirs = KVCache.open_readonly(source.memories[0])
    ours = KVCache.open_readonly(target.memories[0])
    for first in (1, 4):
        np.testing.assert_array_equal(ours.raw[first, ..., :16, :], theirs.raw[first])
        np.testing.assert_array_equal(ours.raw[first, ..., 16:, :], theirs.raw[first + 1])
    theirs.close()
    ours.close()


async def test_an_error_in_a_pull_is_that_pulls_alone(source, target):
    good = handle(source, (1, 2, 3))
    gone = replace(good.ranks[0], location=segment_name(new_epoch(), 0))
    other = replace(good.ranks[0].layout, head_dim=8)
    for ranks, error in (
        ((gone,), UnavailableError),
        ((replace(good.ranks[0], layout=other),), FailedPreconditionError),
    ):
        with pytest.raises(error):
            await target.pull(PullJob(replace(good, ranks=ranks), (1, 2)))
    await target.pull(PullJob(good, (1, 2)))


async def test_a_pull_does_not_wait_for_a_step(source, target):
    target_step = Batch((replace(LONG_STEP.rows[0], block_ids=tuple(range(512))),))
    step = asyncio.create_task(target.execute(target_step))
    await target.pull(PullJob(handle(source, (1, 2, 3)), (510, 511)))
    assert not step.done()
    await step


async def test_a_cancelled_pull_ends_only_when_nothing_writes_any_more(source, target):
    await source.execute(prompt((1, 2, 3)))
    process = suspend(target._workers[0].process.pid)
    try:
        pull = asyncio.create_task(target.pull(PullJob(handle(source, (1, 2, 3)), (20, 21))))
        await asyncio.sleep(0)
        for _ in range(3):
            pull.cancel()
            await asyncio.wait([pull], timeout=0.05)
            assert not pull.done(), "the worker has yet to copy"
    finally:
        process.resume()
    with pytest.raises(asyncio.CancelledError):
        await pull
    theirs = KVCache.open_readonly(source.memories[0])
    ours = KVCache.open_readonly(target.memories[0])
    np.testing.assert_array_equal(ours.raw[20, ..., :16, :], theirs.raw[1])
    theirs.close()
    ours.close()


async def test_a_cancelled_steps_output_is_nobody_elses(source):
    expected = await source.execute(prompt((1, 2, 3)))
    step = asyncio.create_task(source.execute(prompt((4, 5, 6), PROMPT[::-1])))
    await asyncio.sleep(0)
    step.cancel()
    assert await source.execute(prompt((1, 2, 3))) == expected
    assert step.cancelled()


async def test_signals_meant_for_the_daemon_do_not_reach_its_worker(source):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(source._workers[0].process.pid, number)
    await source.execute(prompt((1, 2, 3)))


async def test_a_killed_worker_fails_all_that_waits_and_says_how_it_ended(doomed, source):
    step = asyncio.create_task(doomed.execute(LONG_STEP))
    process = psutil.Process(doomed._workers[0].process.pid)
    await asyncio.sleep(0)
    process.kill()
    assert "killed by SIGKILL" in await doomed.wait_failed()
    with pytest.raises(InternalError, match="SIGKILL"):
        await step
    with pytest.raises(InternalError, match="SIGKILL"):
        await doomed.execute(prompt((1, 2, 3)))
    with pytest.raises(InternalError, match="SIGKILL"):
        await doomed.pull(PullJob(handle(source, (1, 2, 3)), (1, 2, 3)))


async def test_an_error_in_a_step_ends_the_worker(doomed):
    with pytest.raises(InternalError, match="a row's tokens fit its blocks"):
        await doomed.execute(prompt((1,)))
    assert "exited with code 1: AssertionError" in await doomed.wait_failed()


async def test_a_stuck_worker_is_killed_at_stop_and_its_memory_taken_back(doomed, monkeypatch):
    monkeypatch.setattr(executor_module, "WORKER_STOP_TIMEOUT_S", 0.1)
    suspend(doomed._workers[0].process.pid)
    await doomed.stop()  # The fixture checks what is left.


async def test_a_worker_that_is_stopped_has_not_failed(doomed):
    failed = asyncio.create_task(doomed.wait_failed())
    await doomed.stop()
    await asyncio.sleep(0)
    assert not failed.done()
    failed.cancel()
    assert "exited with code 0" in doomed._workers[0].ended.result()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": Path("/nowhere")}, NotFoundError, "/nowhere"),
        ({"use_dummy_weights": False}, NotFoundError, "safetensors"),
        ({"max_model_len": 40_000}, InvalidArgumentError, "made for 32768"),
        ({"num_blocks": 2**40}, ResourceExhaustedError, "KV cache"),
    ],
)
async def test_a_worker_that_cannot_start_says_why_and_leaves_nothing(config, change, error, says):
    before, epoch = workers(), new_epoch()
    with pytest.raises(error, match=says):
        await Executor.start(replace(config, **change), epoch)
    assert workers() == before
    assert not (SEGMENT_DIR / segment_name(epoch, 0)).exists()


async def test_a_start_that_takes_too_long_is_given_up(config, monkeypatch):
    monkeypatch.setattr(executor_module, "WORKER_START_TIMEOUT_S", 0.1)
    before = workers()
    with pytest.raises(InternalError, match=r"within 0\.1 s"):
        await Executor.start(config, new_epoch())
    assert workers() == before


async def test_a_cancelled_start_leaves_nothing(config):
    before = workers()
    start = asyncio.create_task(Executor.start(config, new_epoch()))
    await asyncio.sleep(0)
    assert len(workers()) == len(before) + 1
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert workers() == before
