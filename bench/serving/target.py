"""Whom the load is put on."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

from bench.serving.workload import PlannedRequest


class TargetError(Exception):
    """The target did not answer as asked; says what it said."""


class Target(Protocol):
    """Answers requests in streams; ``async with target`` opens and closes its connections."""

    def answer(self, request: PlannedRequest) -> AsyncIterator[int]:
        """Sends a request; yields how many tokens each message of the answer brings.

        Raises:
            TargetError: It failed.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
