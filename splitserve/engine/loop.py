"""The step loop: schedule, execute, update."""

import asyncio
from collections.abc import Callable

from splitserve.core.request import Progress
from splitserve.engine.executor import Executor
from splitserve.engine.scheduler import Scheduler


class StepLoop:
    """Drives a scheduler's steps through the workers, one at a time.

    Args:
        executor: The node's workers.
        publish: Takes the news of each step.

    Attributes:
        computed_tokens_total: Tokens run through the model since start.
        sampled_tokens_total: Tokens sampled since start.
    """

    def __init__(self, executor: Executor, publish: Callable[[list[Progress]], None]) -> None:
        self._executor = executor
        self._publish = publish
        self._wake = asyncio.Event()
        self.computed_tokens_total = 0
        self.sampled_tokens_total = 0

    def wake(self) -> None:
        """Looks again whether there is something to do."""
        self._wake.set()

    async def run(self, scheduler: Scheduler) -> None:
        """Steps until cancelled; a worker's failure ends it with that error."""
        while True:
            batch = scheduler.schedule()
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            output = await self._executor.execute(batch)
            self.computed_tokens_total += batch.num_tokens
            self.sampled_tokens_total += sum(sample is not None for sample in output.samples)
            self._publish(scheduler.update(batch, output))
