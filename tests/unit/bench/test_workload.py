"""The load is drawn up beforehand: the same for every target, scaled as it says."""

from itertools import pairwise

import pytest

from bench.serving.traces import DRAWN, RECORDED, TraceRow, load_trace
from bench.serving.workload import ARRIVALS, MIN_OUTPUT_TOKENS, Scaling, plan

UNSCALED = Scaling(1.0, 100_000)
TRACE = [TraceRow(2.0 * number, 100 + number, 10 + number) for number in range(50)]


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_requests_come_in_order_within_the_duration_and_always_the_same(arrivals):
    ours, peers = (plan(TRACE, arrivals, 2.0, 10.0, UNSCALED, 512, 7) for _ in range(2))
    assert ours == peers
    due = [request.due_s for request in ours.requests]
    assert len(due) == 20
    assert due == sorted(due)
    assert due[0] >= 0
    assert due[-1] <= 10.0
    assert plan(TRACE, arrivals, 2.0, 10.0, UNSCALED, 512, 8) != ours


def test_a_trace_keeps_its_pattern_and_says_how_much_faster_it_runs():
    workload = plan(TRACE, "trace", 2.0, 10.0, UNSCALED, 512, 0)
    gaps = {round(b.due_s - a.due_s, 6) for a, b in pairwise(workload.requests)}
    assert gaps == {round(10 / 19, 6)}, "one every two seconds, all in ten"
    assert workload.time_factor == pytest.approx(10 / 38)


def test_bursts_are_burstier_than_poisson():
    def spread(arrivals):
        due = [r.due_s for r in plan(TRACE * 20, arrivals, 9.0, 100.0, UNSCALED, 512, 1).requests]
        gaps = [b - a for a, b in pairwise(due)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) ** 0.5 / len(gaps) ** 0.5 / mean

    assert spread("poisson") == pytest.approx(1.0, abs=0.2)
    assert spread("bursty") == pytest.approx(2.0, abs=0.5)


def test_lengths_are_scaled_and_what_is_cut_is_counted():
    workload = plan(TRACE, "trace", 5.0, 10.0, Scaling(0.5, 80), 512, 0)
    for row, request in zip(TRACE, workload.requests, strict=True):
        output = round(row.output_tokens * 0.5)
        assert request.output_tokens == max(output, MIN_OUTPUT_TOKENS)
        assert len(request.prompt) == min(round(row.prompt_tokens * 0.5), 80 - output)
    longer = [
        row for row in TRACE if round(row.prompt_tokens / 2) + round(row.output_tokens / 2) > 80
    ]
    assert workload.cut == len(longer)
    assert 0 < workload.cut < len(TRACE)


@pytest.mark.parametrize("name", [*RECORDED, *DRAWN])
def test_every_named_trace_can_be_read(name):
    trace = load_trace(name)
    assert len(trace) > 5_000
    assert trace[0].at_s == 0
    assert all(row.prompt_tokens > 0 and row.output_tokens > 0 for row in trace)


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'nothing'.*conversation, code"):
        load_trace("nothing")
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n")
    with pytest.raises(ValueError, match="GeneratedTokens"):
        load_trace(str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match="60 requests wanted, it has 50"):
        plan(TRACE, "poisson", 6.0, 10.0, UNSCALED, 512, 0)
