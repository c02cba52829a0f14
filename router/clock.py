"""A node's clock, mapped onto the router's."""

import time
from collections import deque
from collections.abc import Callable

from splitserve.core.config import CLOCK_SAMPLES
from splitserve.v1 import work_pb2


class NodeClock:
    """How far a node's clock is off, by the round trips of pings.

    A pong's time lies somewhere within its round trip, so the shortest of the recent round trips
    knows best (Mills, 1991: NTP's clock filter). Older ones are forgotten, as clocks drift.

    Args:
        now_ns: The router's clock, nanoseconds since the Unix epoch.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._sequence = 0
        self._sent_ns: dict[int, int] = {}
        self._samples: deque[tuple[int, int]] = deque(maxlen=CLOCK_SAMPLES)
        self._offset_ns = 0

    def ping(self) -> work_pb2.Ping:
        """The next ping; send it at once."""
        self._sequence += 1
        self._sent_ns[self._sequence] = self._now_ns()
        self._sent_ns.pop(self._sequence - CLOCK_SAMPLES, None)
        return work_pb2.Ping(sequence=self._sequence)

    def pong(self, pong: work_pb2.Pong) -> None:
        """Takes an answer; one to no ping of ours is ignored."""
        sent_ns = self._sent_ns.pop(pong.sequence, None)
        if sent_ns is None:
            return
        round_trip_ns = self._now_ns() - sent_ns
        self._samples.append((round_trip_ns, pong.time_ns - sent_ns - round_trip_ns // 2))
        self._offset_ns = min(self._samples)[1]

    def to_ours(self, node_time_ns: int) -> int:
        """A moment of the node's clock on the router's."""
        return node_time_ns - self._offset_ns
