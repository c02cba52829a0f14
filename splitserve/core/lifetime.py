"""A request's life as data: every figure about latency is computed from these events."""

from dataclasses import dataclass, field, replace
from enum import Enum


class LifetimeEventKind(Enum):
    """A point in a request's life; the values are the wire's numbers."""

    ISSUED = 1
    PREFILL_BEGIN = 2
    PREFILL_END = 3
    MIGRATION_BEGIN = 4
    MIGRATION_END = 5
    DECODE_BEGIN = 6
    DECODE_END = 7
    PREEMPTED = 8
    RESUMED = 9
    RETRIED = 10
    FINISHED = 11


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """How a request's KV blocks moved.

    Attributes:
        transport: What moved them, for example ``"shm"``.
        size_bytes: Bytes copied into the decode node's cache.
        duration_ns: Time the copy itself took.
    """

    transport: str
    size_bytes: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class LifetimeEvent:
    """Something that happened to a request.

    Attributes:
        kind: What.
        time_ns: Nanoseconds since the Unix epoch, on the clock of whoever holds the event.
        node: Where, as ``kind@address``; ``router`` for the router's own.
        transfer: Only on MIGRATION_END.
    """

    kind: LifetimeEventKind
    time_ns: int
    node: str = ""
    transfer: KvTransfer | None = None


@dataclass(slots=True)
class Lifetime:
    """A request's events in order, on the router's clock.

    Attributes:
        request_id: Whose life this is.
        events: Oldest first.
        time_to_first_token_ns: From receipt to the first bytes handed to the client's stream.
        outcome: Finish reason or status name in lower case; empty while the request lives.
    """

    request_id: str
    events: list[LifetimeEvent] = field(default_factory=list)
    time_to_first_token_ns: int = 0
    outcome: str = ""

    def add(self, event: LifetimeEvent) -> None:
        """Appends an event, never before the last one.

        Clocks of two nodes are known to half a round trip only; cause comes before effect
        all the same.
        """
        if self.events and event.time_ns < self.events[-1].time_ns:
            event = replace(event, time_ns=self.events[-1].time_ns)
        self.events.append(event)
