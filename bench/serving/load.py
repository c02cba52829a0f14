"""Open-loop load: every request is sent when it is due, whatever became of those before it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.serving.target import Target, TargetError
from bench.serving.workload import PlannedRequest

DRAIN_TIMEOUT_S = 60.0
"""How long after the last request answers may take; what is unfinished then has failed."""


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are seconds since the load's begin.

    Attributes:
        due_s: When it was to be sent. All its latencies count from here: a generator that falls
            behind would otherwise hide what a client waits (coordinated omission).
        prompt_tokens: Length of its prompt.
        wanted_tokens: Length of its answer.
        sent_s: When it was sent.
        token_times_s: When each token came.
        error: Why it failed; empty if it did not.
    """

    due_s: float
    prompt_tokens: int
    wanted_tokens: int
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    error: str = "unfinished"

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.token_times_s[-1] - self.token_times_s[0]) / (len(self.token_times_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Time between each two tokens; zero where one message brought both."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def end_to_end_s(self) -> float:
        """Time to the last token."""
        return self.token_times_s[-1] - self.due_s


async def drive(
    target: Target, requests: Sequence[PlannedRequest], drain_timeout_s: float = DRAIN_TIMEOUT_S
) -> list[Answer]:
    """Sends all requests when they are due and reads their answers.

    Returns:
        One answer per request, in their order.
    """
    answers = [
        Answer(request.due_s, len(request.prompt), request.output_tokens) for request in requests
    ]
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, answer in zip(requests, answers, strict=True):
            await asyncio.sleep(max(0.0, begin + request.due_s - time.perf_counter()))
            tasks.append(group.create_task(_read(target, request, answer, begin)))
        if tasks:
            await asyncio.wait(tasks, timeout=drain_timeout_s)
        for task in tasks:
            task.cancel()
    return answers


async def _read(target: Target, request: PlannedRequest, answer: Answer, begin: float) -> None:
    answer.sent_s = time.perf_counter() - begin
    try:
        async for tokens in target.answer(request):
            answer.token_times_s += [time.perf_counter() - begin] * tokens
    except TargetError as error:
        answer.error = str(error)
        return
    received = len(answer.token_times_s)
    answer.error = (
        ""
        if received == answer.wanted_tokens
        else f"{received} tokens instead of {answer.wanted_tokens}"
    )
