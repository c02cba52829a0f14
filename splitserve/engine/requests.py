"""The requests alive on a node, and when their blocks may come back."""

from collections.abc import Iterator

from splitserve.core.request import Request, RequestStatus
from splitserve.engine.batch import Batch
from splitserve.kv.blocks import BlockManager


class LiveRequests:
    """A node's requests by ticket, in the order they came.

    A request that is dropped while a step computes it keeps its blocks until that step is over:
    the workers still write to them.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._by_ticket: dict[str, Request] = {}
        self._in_step: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_ticket.values())

    def add(self, request: Request) -> None:
        """Takes a request, which already owns what blocks it needs."""
        assert request.ticket not in self._by_ticket, "a ticket is never used twice"
        request.status = RequestStatus.RUNNING
        self._by_ticket[request.ticket] = request

    def begin_step(self, batch: Batch) -> None:
        """From here on the workers may write to the blocks of the batch's requests."""
        self._in_step = frozenset(row.ticket for row in batch.rows)

    def end_step(self) -> None:
        """The step is over: blocks of requests dropped meanwhile come back."""
        stepped, self._in_step = self._in_step, frozenset()
        for ticket in stepped:
            request = self._by_ticket.get(ticket)
            if request is not None and request.status is RequestStatus.FINISHED:
                self.drop(ticket)

    def get(self, ticket: str) -> Request | None:
        """The request, unless it is unknown or dropped."""
        request = self._by_ticket.get(ticket)
        return None if request is None or request.status is RequestStatus.FINISHED else request

    def drop(self, ticket: str) -> None:
        """Ends a request; its blocks come back now, or after the step that computes it."""
        request = self._by_ticket.get(ticket)
        if request is None:
            return
        request.status = RequestStatus.FINISHED
        if ticket not in self._in_step:
            del self._by_ticket[ticket]
            self._blocks.free(request.block_ids)

    def hand_over(self, ticket: str) -> Request:
        """Gives a request up together with its blocks, which are the caller's from here on."""
        request = self._by_ticket.pop(ticket)
        request.status = RequestStatus.FINISHED
        return request
