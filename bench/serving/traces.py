"""Recorded or drawn requests: when each came, and how long its prompt and its answer were."""

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "traces"

RECORDED = {
    "conversation": DIRECTORY / "azure_2023_conversation.csv",
    "code": DIRECTORY / "azure_2023_code.csv",
}
"""Traces in this checkout, by name."""

DRAWN = {"short": (128, 64), "long": (1024, 128)}
"""Medians of prompt and output tokens of distributions, by name; both are log-normal."""

DRAWN_SIGMA = 0.6
"""Spread of the drawn lengths' logarithm: one in forty is over three times the median."""

DRAWN_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request.

    Attributes:
        at_s: When it came, from the trace's begin.
        prompt_tokens: Length of its prompt.
        output_tokens: Length of its answer.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int


def load_trace(name: str) -> Sequence[TraceRow]:
    """A trace or distribution by name, or a file with the columns of the Azure traces.

    Raises:
        ValueError: There is no such trace, or it holds no request.
    """
    if name in DRAWN:
        return _drawn(*DRAWN[name])
    path = RECORDED.get(name, Path(name))
    if not path.is_file():
        names = ", ".join((*RECORDED, *DRAWN))
        raise ValueError(f"trace: {name!r} is neither a file nor one of {names}")
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [_row(row) for row in csv.DictReader(lines)]
    if not rows:
        raise ValueError(f"trace: {name!r} holds no request")
    begin_s = rows[0].at_s
    return [TraceRow(row.at_s - begin_s, row.prompt_tokens, row.output_tokens) for row in rows]


def _row(row: dict[str, str]) -> TraceRow:
    try:
        # The trace has a digit more than a datetime holds.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        return TraceRow(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"trace: {row} has no TIMESTAMP, ContextTokens, GeneratedTokens"
        ) from error


def _drawn(prompt_median: int, output_median: int) -> Sequence[TraceRow]:
    """Lengths of a distribution, one request a second."""
    source = random.Random(f"{prompt_median} {output_median}")

    def length(median: int) -> int:
        return max(1, round(source.lognormvariate(math.log(median), DRAWN_SIGMA)))

    return [
        TraceRow(float(number), length(prompt_median), length(output_median))
        for number in range(DRAWN_ROWS)
    ]
