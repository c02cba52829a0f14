"""The four verbs both kinds of node schedule by."""

from typing import Protocol

from splitserve.core.request import Progress, Request, RequestKey
from splitserve.engine.batch import Batch, StepOutput


class Scheduler(Protocol):
    """Decides what the next step computes. Called from the node's event loop only."""

    def add(self, request: Request) -> None:
        """Takes a request.

        Raises:
            ResourceExhaustedError: The bounded queue is full.
            InvalidArgumentError: The request can never fit this node.
        """

    def schedule(self) -> Batch | None:
        """The next step, or None while there is nothing to do."""

    def update(self, batch: Batch, output: StepOutput) -> list[Progress]:
        """Takes a step's tokens into the requests still alive and tells their news."""

    def finish(self, key: RequestKey) -> None:
        """Drops a request; its blocks come back once no step writes to them.

        Unknown ones are ignored.
        """
