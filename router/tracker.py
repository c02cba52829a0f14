"""Every request in the router: which live, and how the latest ones ended."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splitserve.core.config import MAX_FINISHED_LIFETIMES
from splitserve.core.errors import (
    AlreadyExistsError,
    CancelledError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    SplitserveError,
)
from splitserve.core.lifetime import Lifetime, LifetimeEvent, LifetimeEventKind
from splitserve.core.request import FinishReason

log = logging.getLogger(__name__)

ROUTER = "router"
"""How lifetimes call the router."""

Outcome = FinishReason | SplitserveError


class TrackedRequest:
    """One request from receipt to its last message.

    Attributes:
        request_id: Unique among live requests.
        lifetime: Its events so far.
        prompt_tokens: Tokens of its prompt, once they are known.
        cached_tokens: Those of them that had not to be computed.
        completion_tokens: Tokens handed to its client, of all its answers.
        answers_left: Answers that have not ended.
        outcome: How it ended; None while nodes may still work for it.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.lifetime = Lifetime(request_id)
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.answers_left = 1
        self.outcome: Outcome | None = None
        self._on_finish: list[Callable[[], None]] = []
        self._received_ns = time.monotonic_ns()
        self._changed = asyncio.Event()
        self.note(LifetimeEventKind.ISSUED)

    @property
    def answering(self) -> bool:
        """Whether its client has been handed a token."""
        return self.completion_tokens > 0

    def note(self, kind: LifetimeEventKind, node: str = ROUTER) -> None:
        """Adds an event to its life, now."""
        self.lifetime.add(LifetimeEvent(kind, time.time_ns(), node))

    def count_tokens(self, count: int) -> None:
        """Tokens are being handed to the client's stream."""
        if not self.completion_tokens:
            self.lifetime.time_to_first_token_ns = time.monotonic_ns() - self._received_ns
        self.completion_tokens += count

    def end_answer(self, reason: FinishReason) -> None:
        """One of its answers is complete; with the last one the request is."""
        self.answers_left -= 1
        self.wake()
        if not self.answers_left:
            self.finish(reason)

    def finish(self, outcome: Outcome) -> bool:
        """Ends it; only the first call counts.

        Everything that nodes hold is let go of before this returns: neither a slow reader nor a
        waiting task delays that.

        Returns:
            Whether this call ended it.
        """
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.lifetime.outcome = outcome_name(outcome)
        self._close_decode()
        for call in self._on_finish:
            call()
        self.wake()
        return True

    @contextmanager
    def when_finished(self, call: Callable[[], None]) -> Iterator[None]:
        """If it ends within, calls at that very moment."""
        self._on_finish.append(call)
        try:
            yield
        finally:
            self._on_finish.remove(call)

    def wake(self) -> None:
        """Lets `changed` return: there is more for the client."""
        self._changed.set()

    async def changed(self) -> None:
        """Waits until there is more for the client than at the last call."""
        await self._changed.wait()
        self._changed.clear()

    def _close_decode(self) -> None:
        """What the router cuts off itself has no DECODE_END from its node."""
        last: LifetimeEvent | None = None
        for event in self.lifetime.events:
            if event.kind in (LifetimeEventKind.DECODE_BEGIN, LifetimeEventKind.DECODE_END):
                last = event
        if last is not None and last.kind is LifetimeEventKind.DECODE_BEGIN:
            self.note(LifetimeEventKind.DECODE_END, last.node)


class Tracker:
    """All live requests; every count is derived from them.

    Args:
        max_queued_requests: Most requests without a token; more are refused.

    Attributes:
        totals: Finished requests by outcome.
    """

    def __init__(self, max_queued_requests: int) -> None:
        self._max_queued = max_queued_requests
        self._live: dict[str, TrackedRequest] = {}
        self._finished: OrderedDict[str, Lifetime] = OrderedDict()
        self.totals: Counter[str] = Counter()

    @property
    def num_queued(self) -> int:
        """Requests that have no token yet."""
        return sum(not request.answering for request in self._live.values())

    @property
    def num_running(self) -> int:
        """Requests that have streamed a token and are not finished."""
        return sum(request.answering for request in self._live.values())

    @property
    def idle(self) -> bool:
        """Whether no request lives."""
        return not self._live

    @contextmanager
    def track(self, request_id: str) -> Iterator[TrackedRequest]:
        """A request is live within; whichever way it leaves, it is finished and remembered.

        Raises:
            AlreadyExistsError: One of that id lives.
            ResourceExhaustedError: Too many requests have no token yet.
        """
        if request_id in self._live:
            raise AlreadyExistsError(f"request_id: {request_id!r} is running")
        if (queued := self.num_queued) >= self._max_queued:
            raise ResourceExhaustedError(
                f"queue: {queued} requests wait; max_queued_requests is {self._max_queued}"
            )
        request = self._live[request_id] = TrackedRequest(request_id)
        try:
            yield request
        except SplitserveError as error:
            request.finish(error)
            raise
        except asyncio.CancelledError:
            request.finish(CancelledError("the client left"))
            raise
        finally:
            request.finish(InternalError("the answer ended without an outcome"))
            self._remember(request)

    def get(self, request_id: str) -> TrackedRequest:
        """A live request.

        Raises:
            NotFoundError: There is none of that id.
        """
        request = self._live.get(request_id)
        if request is None:
            raise NotFoundError(f"request_id: {request_id!r} is not running")
        return request

    def lifetime(self, request_id: str) -> Lifetime:
        """The life of a live or recently finished request.

        Raises:
            NotFoundError: It is unknown, or too many have finished since.
        """
        if request := self._live.get(request_id):
            return request.lifetime
        if lifetime := self._finished.get(request_id):
            return lifetime
        raise NotFoundError(
            f"request_id: {request_id!r} is neither running nor among the last "
            f"{MAX_FINISHED_LIFETIMES} finished"
        )

    def finish_all(self, error: SplitserveError) -> None:
        """Ends every live request."""
        for request in list(self._live.values()):
            request.finish(error)

    def _remember(self, request: TrackedRequest) -> None:
        del self._live[request.request_id]
        lifetime = request.lifetime
        if lifetime.events[-1].kind is not LifetimeEventKind.FINISHED:
            request.note(LifetimeEventKind.FINISHED)
        self.totals[lifetime.outcome] += 1
        self._finished.pop(request.request_id, None)
        self._finished[request.request_id] = lifetime
        if len(self._finished) > MAX_FINISHED_LIFETIMES:
            self._finished.popitem(last=False)
        _log_end(request)


def _log_end(request: TrackedRequest) -> None:
    events = request.lifetime.events
    log.info(
        "request ends",
        extra={
            "request_id": request.request_id,
            "outcome": request.lifetime.outcome,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.completion_tokens,
            "first_token_ms": round(request.lifetime.time_to_first_token_ns / 1e6, 1),
            "total_ms": round((events[-1].time_ns - events[0].time_ns) / 1e6, 1),
            "retries": sum(event.kind is LifetimeEventKind.RETRIED for event in events),
        },
    )


def outcome_name(outcome: Outcome) -> str:
    """A finish reason or a status name in lower case."""
    name = outcome.name if isinstance(outcome, FinishReason) else outcome.code
    return name.lower()
