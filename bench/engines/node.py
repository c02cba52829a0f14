"""Our side of the engine question: what a node runs, its schedulers and step loop included."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from decode_node.scheduler import DecodeScheduler
from prefill_node.leases import Leases
from prefill_node.scheduler import PrefillScheduler
from splitserve.core.config import EngineConfig, NodeConfig
from splitserve.core.node import NodeKind
from splitserve.core.request import Progress, Request
from splitserve.core.sampling import SamplingParams
from splitserve.core.ticket import new_epoch, new_ticket
from splitserve.engine.batch import Batch, BatchRow
from splitserve.engine.executor import Executor
from splitserve.engine.loop import StepLoop
from splitserve.engine.scheduler import Scheduler
from splitserve.kv.blocks import BlockManager
from splitserve.kv.prefix import PrefixCache

NO_EOS: frozenset[int] = frozenset()
"""Answers end at their length and nowhere else."""


class NodeEngine:
    """One worker, driven as a node with default limits drives it; use `open`.

    Args:
        config: What the worker was told.
        executor: The worker.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._config = NodeConfig(NodeKind.PREFILL, config)
        self._executor = executor
        self._held: list[tuple[Sequence[int], int]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, config: EngineConfig) -> AsyncIterator["NodeEngine"]:
        """Starts the worker, and stops it whatever happens."""
        executor = await Executor.start(config, new_epoch())
        try:
            yield cls(config, executor)
        finally:
            await executor.stop()

    async def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token."""
        blocks = self._all_blocks()
        leases = Leases(blocks, self._config.lease_ttl_s)
        scheduler = PrefillScheduler(self._config, blocks, PrefixCache(blocks), leases, NO_EOS)
        scheduler.add(_request(prompt, max_tokens=1))
        return await self._finish(scheduler, 1)

    async def hold(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Computes prompts that `decode` continues by up to ``count`` tokens each."""
        blocks = self._all_blocks()
        self._held = []
        for prompt in prompts:
            request = _placed(prompt, count, blocks)
            self._held.append((prompt, await self._first_token(request)))

    async def decode(self, count: int) -> float:
        """Seconds from each held prompt's first token to the ``count`` after it, in one batch."""
        # All blocks are free again, and handed out in the same order: KV lies where it did.
        blocks = self._all_blocks()
        scheduler = DecodeScheduler(blocks, PrefixCache(blocks), NO_EOS)
        for prompt, first_token in self._held:
            request = _placed(prompt, count, blocks)
            request.computed = len(prompt)
            request.append(first_token, NO_EOS)
            scheduler.add(request)
        return await self._finish(scheduler, len(self._held))

    def _all_blocks(self) -> BlockManager:
        return BlockManager(self._executor.shape.num_blocks, self._config.engine.block_size)

    async def _first_token(self, request: Request) -> int:
        """Computes a prompt's KV in place: what a pull brings a decode node."""
        while True:
            left = request.prompt_length - request.computed
            row = BatchRow.of(request, min(left, self._config.max_tokens_per_batch))
            output = await self._executor.execute(Batch((row,)))
            request.computed += len(row.token_ids)
            if output.samples[0]:
                return output.samples[0][0].token_id

    async def _finish(self, scheduler: Scheduler, num_requests: int) -> float:
        """Seconds until the step loop has finished all requests."""
        done = asyncio.Event()
        left = num_requests

        def publish(news: list[Progress]) -> None:
            nonlocal left
            left -= sum(progress.finish_reason is not None for progress in news)
            if left == 0:
                done.set()

        begin = time.perf_counter()
        steps = asyncio.create_task(StepLoop(self._executor, publish).run(scheduler))
        finished = asyncio.create_task(done.wait())
        await asyncio.wait([steps, finished], return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - begin
        finished.cancel()
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await steps  # A worker that failed says so here.
        return seconds


def _placed(prompt: Sequence[int], count: int, blocks: BlockManager) -> Request:
    """A request with blocks for all its growth, as the import queue reserves them."""
    request = _request(prompt, max_tokens=count + 1)
    request.block_ids = blocks.allocate(blocks.blocks_for(request.max_length))
    return request


def _request(prompt: Sequence[int], max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    return Request("", list(prompt), len(prompt), sampling, new_ticket())
