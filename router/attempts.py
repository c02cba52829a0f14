"""What one node holds for this router: the only record of its load and of its room."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from splitserve.core.config import OVERLOAD_PAUSE_S
from splitserve.v1 import work_pb2

if TYPE_CHECKING:
    from router.session import NodeSession


class Holder(Protocol):
    """Whose attempt it is. Both calls are plain functions: the stream waits for nobody."""

    def on_progress(self, attempt: "Attempt", progress: work_pb2.Progress) -> None:
        """Takes the node's news."""

    def on_lost(self, attempt: "Attempt", reason: str) -> None:
        """The node is gone, and with it all it held."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A prompt or answers that a node computes, or a prompt's KV that it leases.

    Attributes:
        ticket: The hand-over it belongs to.
        num_tokens: Tokens given to the node whose KV it had not yet.
        session: The node.
        holder: Who takes its news.
        open: Indexes of the answers that the node computes, or may yet be pulled.
        untold: Those of which it has not told a token.
        leased: Whether the prompt is computed and only its KV is held.
        early: Whether the node pulls a prompt that is still computed: its loss is nobody's.
    """

    ticket: str
    num_tokens: int
    session: "NodeSession"
    holder: Holder
    open: set[int]
    untold: set[int]
    leased: bool = False
    early: bool = False


class Load(NamedTuple):
    """What one node has to do for this router.

    Attributes:
        answers: Answers it computes.
        tokens: Tokens it was given with these, but for those whose KV it had.
        leased_tokens: Tokens whose KV it only keeps.
    """

    answers: int
    tokens: int
    leased_tokens: int


class Attempts:
    """All attempts on one node, by ticket.

    Args:
        on_room: Called whenever the node may have room for more.

    Attributes:
        by_ticket: Read by whoever hands out news; changed only here.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        self.by_ticket: dict[str, Attempt] = {}
        self._on_room = on_room
        self._limit: int | None = None
        self._refused_s = 0.0

    def __len__(self) -> int:
        return len(self.by_ticket)

    @property
    def load(self) -> Load:
        """How much the node has to do and to keep."""
        computing = [a for a in self.by_ticket.values() if not a.leased]
        return Load(
            answers=sum(len(a.open) for a in computing),
            tokens=sum(a.num_tokens for a in computing),
            leased_tokens=sum(a.num_tokens for a in self.by_ticket.values() if a.leased),
        )

    @property
    def has_room(self) -> bool:
        """Whether it is worth asking the node to take one more.

        After a refusal that is so once it has less to do, or one more every so often, as others
        may use it too.
        """
        if self._limit is None:
            return True
        grown = int((time.monotonic() - self._refused_s) / OVERLOAD_PAUSE_S)
        return self._num_computing < self._limit + grown

    @property
    def _num_computing(self) -> int:
        return sum(not attempt.leased for attempt in self.by_ticket.values())

    def add(self, attempt: Attempt) -> None:
        """The node is given one more."""
        assert attempt.ticket not in self.by_ticket, "a ticket is on a node once"
        self.by_ticket[attempt.ticket] = attempt

    def drop(self, attempt: Attempt) -> bool:
        """The node holds nothing of it any more; says whether it was known."""
        if self.by_ticket.pop(attempt.ticket, None) is None:
            return False
        self._on_room()
        return True

    def lease(self, attempt: Attempt) -> None:
        """The prompt is computed; its KV stays for a decode node."""
        if not attempt.leased:
            attempt.leased = True
            self._on_room()

    def refuse(self) -> None:
        """The node takes no more than what it has: not a failure, but no use to ask again yet."""
        self._limit = self._num_computing
        self._refused_s = time.monotonic()

    def take_all(self) -> list[Attempt]:
        """All of them, of which the node holds nothing any more."""
        attempts = list(self.by_ticket.values())
        self.by_ticket.clear()
        return attempts
