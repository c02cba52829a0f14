"""The step loop: schedule, execute, update."""

import asyncio
from collections import deque
from collections.abc import Callable

from splitserve.core.request import Progress
from splitserve.engine.batch import Batch, StepOutput
from splitserve.engine.executor import Executor
from splitserve.engine.scheduler import Scheduler


class StepLoop:
    """Drives a scheduler's steps through the workers, as many at a time as there are stages.

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
        self._news: list[Progress] = []
        self._under_way: deque[tuple[Batch, asyncio.Task[StepOutput]]] = deque()
        self.computed_tokens_total = 0
        self.sampled_tokens_total = 0

    def wake(self) -> None:
        """Looks again whether there is something to do."""
        self._wake.set()

    async def run(self, scheduler: Scheduler) -> None:
        """Steps until cancelled; a worker's failure ends it with that error."""
        try:
            while True:
                while self._has_room and (batch := scheduler.schedule()) is not None:
                    step = asyncio.create_task(self._executor.execute(batch))
                    self._under_way.append((batch, step))
                if self._news:
                    # Only once the next step is on its way: the workers need not wait for this.
                    await asyncio.sleep(0)
                    news, self._news = self._news, []
                    self._publish(news)
                await self._wait()
                # Steps end in the order they began. After each comes the next of the same requests:
                # with two taken at once, what the first ends would change who is in the second.
                if self._under_way and self._under_way[0][1].done():
                    batch, step = self._under_way.popleft()
                    self._update(scheduler, batch, step.result())
        finally:
            for _, step in self._under_way:
                step.cancel()

    @property
    def _has_room(self) -> bool:
        return len(self._under_way) < self._executor.depth

    async def _wait(self) -> None:
        """Until the oldest step is over, or another one may have something to do."""
        self._wake.clear()
        if not self._under_way:
            await self._wake.wait()
            return
        waits: list[asyncio.Task[object]] = [self._under_way[0][1]]
        if self._has_room:
            waits.append(asyncio.create_task(self._wake.wait()))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits[1:]:
            wait.cancel()

    def _update(self, scheduler: Scheduler, batch: Batch, output: StepOutput) -> None:
        self.computed_tokens_total += batch.num_tokens
        self.sampled_tokens_total += sum(map(len, output.samples))
        self._news += scheduler.update(batch, output)
