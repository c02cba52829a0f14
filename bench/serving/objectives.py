"""What users expect of a service, and how much load it takes without failing them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.serving.load import Answer

GOODPUT_ATTAINMENT = 0.9
"""Share of requests whose objectives hold, up to which a rate counts as served."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level objectives of one request.

    Attributes:
        ttft_s: Longest time to first token.
        tpot_s: Longest time per output token after the first.
    """

    ttft_s: float
    tpot_s: float

    def met_by(self, answer: Answer) -> bool:
        """Whether one answer is complete and fast enough."""
        return not answer.error and answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s

    def __str__(self) -> str:
        return f"TTFT {self.ttft_s * 1e3:g} ms, TPOT {self.tpot_s * 1e3:g} ms"

    def attainment(self, answers: Sequence[Answer]) -> float:
        """The share of answers that meet them."""
        return sum(map(self.met_by, answers)) / len(answers)


def goodput(rates: Sequence[float], attainments: Sequence[float]) -> float:
    """Highest rate at which 90 % of requests meet their objectives, in requests a second.

    Between measured rates attainment is taken to be a straight line. A target that meets the
    mark at all rates gets the highest, which is then a lower bound; one that meets it at none, 0.
    """
    points = sorted(zip(rates, attainments, strict=True))
    best = points[0][0] if points[0][1] >= GOODPUT_ATTAINMENT else 0.0
    for (rate, share), (next_rate, next_share) in pairwise(points):
        if next_share >= GOODPUT_ATTAINMENT:
            best = next_rate
        elif share >= GOODPUT_ATTAINMENT:
            part = (share - GOODPUT_ATTAINMENT) / (share - next_share)
            best = rate + part * (next_rate - rate)
    return best
