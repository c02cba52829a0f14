"""The serve question's figures: every side at every rate."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from bench.serving.load import Answer
from bench.serving.objectives import Objectives, goodput

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of one kind of latency, in seconds; not a number where nothing was measured."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        """From all that was measured."""
        return cls(*(np.percentile(seconds or [np.nan], PERCENTILES).tolist()))


@dataclass(frozen=True, slots=True)
class Point:
    """One side at one rate.

    Attributes:
        rate: Requests a second.
        answers: What became of each request.
        objectives: What is expected of each.
    """

    rate: float
    answers: Sequence[Answer]
    objectives: Objectives

    @property
    def attainment(self) -> float:
        """Share of requests that meet their objectives."""
        return self.objectives.attainment(self.answers)

    @property
    def failed(self) -> list[str]:
        """Why requests failed, those that did."""
        return [answer.error for answer in self.answers if answer.error]

    @property
    def late_s(self) -> float:
        """The latest that the generator sent a request after it was due."""
        return max(answer.sent_s - answer.due_s for answer in self.answers)

    def latencies(self) -> dict[str, Latency]:
        """By name, of the answers that are complete."""
        whole = [answer for answer in self.answers if not answer.error]
        return {
            "TTFT": Latency.of([answer.ttft_s for answer in whole]),
            "TPOT": Latency.of([answer.tpot_s for answer in whole]),
            "inter-token": Latency.of([gap for answer in whole for gap in answer.gaps_s]),
            "end to end": Latency.of([answer.end_to_end_s for answer in whole]),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything measured and what follows from it."""
        return {
            "rate": self.rate,
            "requests": len(self.answers),
            "failed": self.failed,
            "attainment": self.attainment,
            "latencies_s": {name: asdict(one) for name, one in self.latencies().items()},
            "generator_late_s": self.late_s,
        }


@dataclass(frozen=True, slots=True)
class Curves:
    """All sides at the same rates.

    Attributes:
        sides: Every side's points, by its name and in the order of rates.
    """

    sides: dict[str, Sequence[Point]]

    def goodput(self, side: str) -> float:
        """See `objectives.goodput`."""
        points = self.sides[side]
        return goodput([one.rate for one in points], [one.attainment for one in points])

    def as_json(self) -> dict[str, Any]:
        """See `report.Findings`."""
        return {
            "sides": {
                name: {"goodput": self.goodput(name), "points": [one.as_json() for one in points]}
                for name, points in self.sides.items()
            }
        }

    def table(self, coloured: bool) -> Table:
        """See `report.Findings`."""
        del coloured
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        headings = ("requests/s", "failed", "TTFT p50 / p99", "TPOT p50 / p99")
        for heading in (*headings, "inter-token p50 / p99", "end to end p50 / p99", "attained"):
            table.add_column(heading, justify="right")
        for points in zip(*self.sides.values(), strict=True):
            for name, point in zip(self.sides, points, strict=True):
                table.add_row(
                    name,
                    f"{point.rate:g}",
                    f"{len(point.failed)} of {len(point.answers)}",
                    *(_milliseconds(one) for one in point.latencies().values()),
                    f"{point.attainment:.0%}",
                )
        return table


def _milliseconds(latency: Latency) -> str:
    return f"{latency.p50 * 1e3:,.0f} / {latency.p99 * 1e3:,.0f} ms"
