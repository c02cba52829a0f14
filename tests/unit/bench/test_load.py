"""The load never waits for the server, and what a client waits counts from when it was due."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.serving.curves import Curves, Point
from bench.serving.load import Answer, drive
from bench.serving.objectives import Objectives, goodput
from bench.serving.target import TargetError
from bench.serving.workload import PlannedRequest


class Scripted:
    """Answers as it is told to; notes how many requests it holds at once."""

    def __init__(self, behave) -> None:
        self._behave = behave
        self.held = self.most_held = 0

    async def answer(self, request: PlannedRequest) -> AsyncIterator[int]:
        self.held += 1
        self.most_held = max(self.held, self.most_held)
        try:
            async for tokens in self._behave(request):
                yield tokens
        finally:
            self.held -= 1


def requests(count: int, gap_s: float, output_tokens: int = 4) -> list[PlannedRequest]:
    return [PlannedRequest(gap_s * number, (1, 2), output_tokens) for number in range(count)]


async def test_requests_are_sent_when_due_though_none_is_answered():
    all_sent = asyncio.Event()

    async def behave(request):
        if target.held == 20:
            all_sent.set()
        await all_sent.wait()
        yield 4

    target = Scripted(behave)
    answers = await drive(target, requests(20, 0.01))
    assert target.most_held == 20
    assert not any(answer.error for answer in answers)
    # The first waited for the last to be due.
    assert answers[0].ttft_s >= 0.19
    assert all(answer.sent_s >= answer.due_s for answer in answers)


async def test_failed_short_and_unfinished_answers_are_told_apart():
    async def behave(request):
        yield 2
        if request.output_tokens == 5:
            raise TargetError("no room")
        if request.output_tokens == 6:
            await asyncio.Event().wait()
        yield 2

    target = Scripted(behave)
    plan = [PlannedRequest(0.0, (1,), tokens) for tokens in (4, 5, 6, 7)]
    answers = await drive(target, plan, drain_timeout_s=0.2)
    assert [answer.error for answer in answers] == [
        "", "no room", "unfinished", "4 tokens instead of 7"
    ]  # fmt: skip
    assert target.held == 0, "what was unfinished is given up"


def answer(due_s: float, *times_s: float, error: str = "") -> Answer:
    return Answer(due_s, 10, len(times_s), due_s + 0.5, list(times_s), error)


def test_latencies_count_from_when_the_request_was_due():
    one = answer(1.0, 3.0, 3.0, 4.0, 6.0)
    assert one.ttft_s == 2.0
    assert one.tpot_s == 1.0
    assert one.gaps_s == [0.0, 1.0, 2.0]
    assert one.end_to_end_s == 5.0


def test_an_objective_is_met_by_complete_and_fast_answers_only():
    objectives = Objectives(ttft_s=2.0, tpot_s=1.0)
    assert objectives.met_by(answer(1.0, 3.0, 4.0))
    assert not objectives.met_by(answer(0.9, 3.0, 4.0)), "first token late"
    assert not objectives.met_by(answer(1.0, 3.0, 4.1)), "slow tokens"
    assert not objectives.met_by(answer(1.0, 3.0, 4.0, error="lost"))


@pytest.mark.parametrize(
    ("attainments", "expected"),
    [
        ((1.0, 1.0, 0.8), 3.0),  # halfway between 2 and 4
        ((1.0, 0.9, 0.0), 2.0),
        ((1.0, 0.95, 0.91), 4.0),  # not reached: the highest measured
        ((0.8, 0.5, 0.0), 0.0),
    ],
)
def test_goodput_is_where_nine_of_ten_are_still_met(attainments, expected):
    assert goodput((1.0, 2.0, 4.0), attainments) == pytest.approx(expected)


def test_the_table_has_every_side_at_every_rate_and_failures_are_no_latencies():
    objectives = Objectives(2.0, 1.0)
    good = Point(1.0, [answer(0.0, 0.1, 0.2), answer(0.0, 0.3, 0.4)], objectives)
    bad = Point(1.0, [answer(0.0, 0.1, 0.2), answer(0.0, 9.0, error="lost")], objectives)
    curves = Curves({"ours": [good], "theirs": [bad]})
    rates = list(curves.table(coloured=False).columns[-1].cells)
    assert rates == ["100%", "50%"]
    told = curves.as_json()["sides"]
    assert told["ours"]["goodput"] == 1.0
    assert told["theirs"]["goodput"] == 0.0
    assert told["theirs"]["points"][0]["failed"] == ["lost"]
    assert told["theirs"]["points"][0]["latencies_s"]["TTFT"]["p99"] == pytest.approx(0.1)
