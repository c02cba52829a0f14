"""The node's handle on all its workers. Lives in the node's event loop; imports no torch."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from splitserve.core.config import WORKER_START_TIMEOUT_S, WORKER_STOP_TIMEOUT_S, EngineConfig
from splitserve.core.errors import InternalError
from splitserve.core.node import RankInfo
from splitserve.engine.batch import Batch, StepOutput
from splitserve.engine.launch import LaunchedRank, join_ranks, listen
from splitserve.engine.messages import Ready, Start
from splitserve.engine.process import RankProcess, WorkerProcess
from splitserve.engine.shape import NodeShape
from splitserve.engine.spawn import SpawnedRank
from splitserve.kv.handle import RankMemory
from splitserve.kv.memory import free_bytes
from splitserve.transfer.transport import PullJob, PullResult

log = logging.getLogger(__name__)


class Executor:
    """All ranks of a node: started, stepped, fed and stopped together; use `start`.

    One that ends by itself takes the others along: `wait_failed` says which, and every call that
    is under way or made later raises.

    Attributes:
        shape: What the node is.
        memories: Each rank's KV, as peers reach it.
        transport: How they do.
        ranks: What each rank holds.
        depth: Steps that can be under way at once, one for each pipeline stage.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: NodeShape,
        workers: Sequence[WorkerProcess],
        ready: Sequence[Ready],
    ) -> None:
        self._workers = tuple(workers)
        # The first tensor rank of the last stage.
        self._sampler = self._workers[-config.parallel.tensor_parallel_size]
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for worker in self._workers:
            worker.ended.add_done_callback(self._on_ended)
        self._stopping = False
        self.shape = shape
        self.memories: tuple[RankMemory, ...] = tuple(one.memory for one in ready)
        self.transport = ready[0].transport
        self.ranks = tuple(
            RankInfo(one.weight_bytes, shape.num_blocks * layout.block_bytes)
            for one, layout in zip(ready, shape.layouts, strict=True)
        )
        self.depth = config.parallel.pipeline_parallel_size

    @classmethod
    async def start(cls, config: EngineConfig, epoch: str) -> "Executor":
        """Starts the workers and waits until they have loaded their model and warmed up.

        Raises:
            SplitserveError: A worker could not start; one clear sentence. None is left.
        """
        begin = time.monotonic()
        shape = NodeShape.plan(config, _free_bytes(config))
        workers: list[WorkerProcess] = []
        try:
            await _gather(workers, config, shape, epoch)
            async with asyncio.timeout(WORKER_START_TIMEOUT_S):
                for worker in workers:
                    worker.begin()
                ready = await asyncio.gather(*(worker.ready for worker in workers))
        except BaseException as error:
            await _stop_all(workers, 0.0)
            if isinstance(error, TimeoutError):
                raise InternalError(
                    f"worker: it did not report within {WORKER_START_TIMEOUT_S:g} s"
                ) from None
            raise
        log.info(
            "workers ready",
            extra={
                "ranks": len(workers),
                "num_blocks": shape.num_blocks,
                "max_model_len": shape.max_model_len,
                "kv_dtype": shape.dtype,
                "seconds": f"{time.monotonic() - begin:.1f}",
            },
        )
        return cls(config, shape, workers, ready)

    async def execute(self, batch: Batch) -> StepOutput:
        """Computes one step on every rank; up to `depth` may be under way at once.

        If cancelled, the workers finish the step all the same.

        Raises:
            InternalError: A worker has died, or dies in this step.
        """
        assert batch.rows, "a step computes something"
        for worker in self._workers:
            if worker is not self._sampler:
                worker.take_part(batch)
        try:
            output: StepOutput = await self._sampler.step(batch)
        except InternalError:
            if self._failed.done():  # What came first is the reason.
                raise InternalError(self._failed.result()) from None
            raise
        return output

    async def pull(self, job: PullJob) -> PullResult:
        """Copies a ticket's KV into the same blocks of every rank; several may run at once.

        Returns or raises only once no worker writes to the blocks any more, also if cancelled.

        Raises:
            UnavailableError: The source's memory cannot be reached.
            FailedPreconditionError: Its shape does not fit this model's.
            InternalError: A worker has died.
        """
        results: list[PullResult] = await _all_done([worker.pull(job) for worker in self._workers])
        return PullResult(
            sum(result.size_bytes for result in results),
            max(result.duration_ns for result in results),
        )

    async def wait_failed(self) -> str:
        """Waits for the first worker to end unasked; says which and how."""
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Ends every worker, kindly first, and clears what they left behind."""
        self._stopping = True
        await _stop_all(self._workers, WORKER_STOP_TIMEOUT_S)

    def _on_ended(self, ended: "asyncio.Future[str]") -> None:
        if not self._stopping and not self._failed.done():
            self._failed.set_result(ended.result())
            # The others wait for it, and for good.
            for worker in self._workers:
                worker.kill()


async def _gather(
    workers: list[WorkerProcess], config: EngineConfig, shape: NodeShape, epoch: str
) -> None:
    """Starts or awaits a process per rank, and links to it; ``workers`` has all there are."""
    num_ranks, launch = config.parallel.num_ranks, config.launch
    others: dict[int, LaunchedRank] = {}
    host, host_name = "127.0.0.1", "this host"
    if launch is not None:
        host, host_name = launch.host, "MASTER_ADDR"
        if num_ranks > 1:
            others = await join_ranks(launch)
    with listen(host, 0, host_name) as meeting:
        for rank in range(num_ranks):
            process: RankProcess = others.get(rank) or SpawnedRank(
                rank,
                config.threads,
                meeting if num_ranks > 1 and rank == 0 else None,
                only_here=launch is None,
            )
            start = Start(config, shape, epoch, rank, host, meeting.getsockname()[1])
            workers.append(WorkerProcess(start, process))
    await asyncio.gather(*(worker.connect() for worker in workers))


def _free_bytes(config: EngineConfig) -> int:
    """Memory that KV of all ranks can have; other hosts are taken for ones like this."""
    if config.launch is None:
        return free_bytes()
    return free_bytes() * config.launch.num_ranks // config.launch.local_ranks


async def _all_done(calls: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Every call's result, once all are over; a cancellation waits until then too."""
    cancelled: asyncio.CancelledError | None = None
    while not all(call.done() for call in calls):
        try:
            await asyncio.wait(calls)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return [call.result() for call in calls]


async def _stop_all(workers: Sequence[WorkerProcess], timeout_s: float) -> None:
    await asyncio.gather(*(worker.stop(timeout_s) for worker in workers))
