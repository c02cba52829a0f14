"""What is asked, and when: drawn up before the first request is sent, the same for every target."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from bench.serving.traces import TraceRow

Arrivals = Literal["poisson", "bursty", "trace"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)

BURSTY_SHAPE = 0.25
"""Of the gamma distribution of bursty gaps: their standard deviation is twice their mean."""

MIN_OUTPUT_TOKENS = 2
"""Fewer have no time per output token."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace is made to fit.

    Attributes:
        lengths: Factor of prompt and output lengths.
        max_tokens: Longest prompt and answer together; longer prompts are cut.
    """

    lengths: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come.

    Attributes:
        due_s: When it is sent, from the begin, whatever became of those before it.
        prompt: Its tokens.
        output_tokens: Length of its answer, which nothing ends early.
    """

    due_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one rate.

    Attributes:
        rate: Requests a second.
        duration_s: Within which all come.
        requests: In the order they are due.
        time_factor: How much slower than in the trace they come; 0 where arrivals are drawn.
        cut: How many prompts were cut.
    """

    rate: float
    duration_s: float
    requests: Sequence[PlannedRequest]
    time_factor: float
    cut: int


def plan(
    trace: Sequence[TraceRow],
    arrivals: Arrivals,
    rate: float,
    duration_s: float,
    scaling: Scaling,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Draws up a workload: consecutive requests of the trace, from a place chosen by the seed.

    Raises:
        ValueError: The trace is too short.
    """
    source = random.Random(f"{seed} {rate} {duration_s}")
    count = max(1, round(rate * duration_s))
    if count > len(trace):
        raise ValueError(f"trace: {count} requests wanted, it has {len(trace)}")
    begin = source.randrange(len(trace) - count + 1)
    rows = trace[begin : begin + count]
    time_factor = 0.0
    if arrivals == "trace":
        recorded_s = max(rows[-1].at_s - rows[0].at_s, 1e-9)
        time_factor = duration_s / recorded_s
        due = [(row.at_s - rows[0].at_s) * time_factor for row in rows]
    else:
        due = _drawn_arrivals(
            source, count, duration_s, BURSTY_SHAPE if arrivals == "bursty" else 1
        )
    lengths = [_scaled(row, scaling) for row in rows]
    requests = [
        PlannedRequest(at_s, tuple(source.choices(range(vocab_size), k=prompt)), output)
        for at_s, (prompt, output, _) in zip(due, lengths, strict=True)
    ]
    return Workload(rate, duration_s, requests, time_factor, sum(cut for *_, cut in lengths))


def _drawn_arrivals(
    source: random.Random, count: int, duration_s: float, shape: float
) -> list[float]:
    """Times with gamma-distributed gaps (shape 1: a Poisson process), this many in the duration.

    Given their number, a Poisson process's arrivals are spread so: every target and seed gets
    the same load, only its pattern is drawn.
    """
    gaps = [source.gammavariate(shape, 1.0) for _ in range(count + 1)]
    factor = duration_s / sum(gaps)
    times, at_s = [], 0.0
    for gap in gaps[:-1]:
        at_s += gap * factor
        times.append(at_s)
    return times


def _scaled(row: TraceRow, scaling: Scaling) -> tuple[int, int, bool]:
    """Prompt and output tokens, and whether the prompt was cut."""
    wanted = round(row.output_tokens * scaling.lengths)
    output = min(max(MIN_OUTPUT_TOKENS, wanted), scaling.max_tokens - 1)
    prompt = max(1, round(row.prompt_tokens * scaling.lengths))
    room = scaling.max_tokens - output
    return min(prompt, room), output, prompt > room
