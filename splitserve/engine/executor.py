"""The node's handle on all its workers. Lives in the node's event loop; imports no torch."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from splitserve.core.config import WORKER_START_TIMEOUT_S, WORKER_STOP_TIMEOUT_S, EngineConfig
from splitserve.core.errors import InternalError
from splitserve.engine.batch import Batch, StepOutput
from splitserve.engine.messages import Ready
from splitserve.engine.process import WorkerProcess
from splitserve.kv.handle import RankMemory
from splitserve.transfer.transport import PullJob, PullResult

log = logging.getLogger(__name__)


class Executor:
    """All ranks of a node: started, stepped, fed and stopped together; use `start`.

    One that ends by itself takes the others' usefulness along: `wait_failed` says so, and every
    call that is under way or made later raises.

    Attributes:
        memories: Each rank's KV, as peers reach it.
        transport: How they do.
        num_blocks: KV blocks, the same ids on every rank.
        max_model_len: Most tokens of prompt and answer together.
        vocab_size: Tokens the model has logits for.
        kv_dtype: Data type of KV.
        eos_token_ids: Tokens that end an answer.
    """

    def __init__(self, workers: Sequence[WorkerProcess], ready: Sequence[Ready]) -> None:
        self._workers = tuple(workers)
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for worker in self._workers:
            worker.ended.add_done_callback(self._on_ended)
        self._stopping = False
        last = ready[-1]
        self.memories: tuple[RankMemory, ...] = tuple(one.memory for one in ready)
        self.transport = last.transport
        self.num_blocks = min(memory.num_blocks for memory in self.memories)
        self.max_model_len = min(one.max_model_len for one in ready)
        self.vocab_size = last.vocab_size
        self.kv_dtype = last.memory.layout.dtype
        self.eos_token_ids = last.eos_token_ids

    @classmethod
    async def start(cls, config: EngineConfig, epoch: str) -> "Executor":
        """Starts the workers and waits until they have loaded their model and warmed up.

        Raises:
            SplitserveError: A worker could not start; one clear sentence. None is left.
        """
        begin = time.monotonic()
        workers: list[WorkerProcess] = []
        try:
            async with asyncio.timeout(WORKER_START_TIMEOUT_S):
                workers.append(WorkerProcess(0, config, epoch))
                await asyncio.gather(*(worker.connect() for worker in workers))
                ready = await asyncio.gather(*(worker.ready for worker in workers))
        except BaseException as error:
            await _stop_all(workers, 0.0)
            if isinstance(error, TimeoutError):
                raise InternalError(
                    f"worker: it did not report within {WORKER_START_TIMEOUT_S:g} s"
                ) from None
            raise
        executor = cls(workers, ready)
        log.info(
            "workers ready",
            extra={
                "ranks": len(workers),
                "num_blocks": executor.num_blocks,
                "max_model_len": executor.max_model_len,
                "kv_dtype": executor.kv_dtype,
                "seconds": f"{time.monotonic() - begin:.1f}",
            },
        )
        return executor

    async def execute(self, batch: Batch) -> StepOutput:
        """Computes one step on every rank; the last one's tokens count.

        If cancelled, the workers finish the step all the same.

        Raises:
            InternalError: A worker has died, or dies in this step.
        """
        assert batch.rows, "a step computes something"
        outputs: list[StepOutput] = await asyncio.gather(
            *(worker.step(batch) for worker in self._workers)
        )
        return outputs[-1]

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
            log.error("%s", ended.result())
            self._failed.set_result(ended.result())


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
