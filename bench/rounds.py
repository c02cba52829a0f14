"""Two sides of a question take turns."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

Measure = Callable[[int], Awaitable[float]]
"""Measures one side once, given the round; larger is better."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Both sides' figures, round by round; larger is better.

    Attributes:
        ours: Ours.
        peers: The peer's, taken right before or after ours of the same round.
    """

    ours: Sequence[float]
    peers: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.ours) == len(self.peers) > 0, "both sides take part in every round"

    @property
    def our_median(self) -> float:
        """Our median round's figure."""
        return median(self.ours)

    @property
    def peer_median(self) -> float:
        """The peer's median round's figure."""
        return median(self.peers)

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's in each round."""
        return [ours / peer for ours, peer in zip(self.ours, self.peers, strict=True)]

    @property
    def ratio(self) -> float:
        """The median round's: a machine that speeds up or slows down over time drops out."""
        return median(self.ratios)


async def take_turns(ours: Measure, peers: Measure, count: int) -> Rounds:
    """Measures both sides ``count`` times, one at a time.

    Who begins changes with every round: a machine that heats up wrongs neither side.
    """
    figures: dict[Measure, list[float]] = {ours: [], peers: []}
    for number in range(count):
        order = (ours, peers) if number % 2 == 0 else (peers, ours)
        for side in order:
            figures[side].append(await side(number))
    return Rounds(figures[ours], figures[peers])
