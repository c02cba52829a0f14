"""`n` answers to one prompt: each is the one that its own seed gives alone."""

from dataclasses import replace

import pytest

from splitserve.core.errors import InvalidArgumentError
from splitserve.core.request import FinishReason
from splitserve.core.sampling import SamplingParams

SAMPLING = SamplingParams(max_tokens=24, seed=11, ignore_eos=True, n=5)


def prompt(length: int) -> list[int]:
    return [3 + 31 * i * i % 500 for i in range(length)]


def counts(client) -> dict[str, int]:
    return {node.info.kind.label: node.computed_tokens_total for node in client.status().nodes}


@pytest.mark.parametrize("length", [1, 32, 45])
def test_each_answer_is_that_of_its_own_seed_alone(client, one_process, length):
    answers = client.generate(token_ids=prompt(length), sampling=SAMPLING).completions()
    assert [answer.index for answer in answers] == list(range(5))
    for index, answer in enumerate(answers):
        alone = replace(SAMPLING, seed=11 + index, n=1)
        assert list(answer.token_ids) == one_process.generate(prompt(length), alone).token_ids
    assert len({answer.token_ids for answer in answers}) == 5
    assert answers[0].usage.completion_tokens == 5 * 24


def test_a_prompt_is_computed_and_pulled_once(client):
    before = counts(client)
    answers = client.generate(token_ids=prompt(201)[1:], sampling=SAMPLING).completions()
    after = counts(client)
    assert after["prefill"] - before["prefill"] == 200
    assert after["decode"] - before["decode"] == 5 * 23
    [moved] = [event.transfer for event in answers[0].lifetime.events if event.transfer]
    assert moved.size_bytes == 200 * 2 * 2 * 2 * 16 * 4, "tokens, layers, K and V, heads, size"


def test_penalties_see_each_answers_own_tokens(client, one_process):
    penalised = replace(SAMPLING, frequency_penalty=0.8, repetition_penalty=1.2, n=3)
    answers = client.generate(token_ids=prompt(40), sampling=penalised).completions()
    for index, answer in enumerate(answers):
        alone = replace(penalised, seed=11 + index, n=1)
        assert list(answer.token_ids) == one_process.generate(prompt(40), alone).token_ids


def test_answers_that_end_early_leave_the_others_alone(client, one_process):
    ends = replace(SAMPLING, ignore_eos=False, max_tokens=60, n=16)
    answers = client.generate(token_ids=prompt(9), sampling=ends).completions()
    for index, answer in enumerate(answers):
        judged = one_process.generate(prompt(9), replace(ends, seed=11 + index, n=1))
        assert list(answer.token_ids) == judged.token_ids
        assert answer.finish_reason is judged.finish_reason
    reasons = {answer.finish_reason for answer in answers}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}, "the test needs both"


def test_the_largest_seed_wraps_around(client, one_process):
    last = replace(SAMPLING, seed=2**64 - 1, n=2)
    answers = client.generate(token_ids=prompt(5), sampling=last).completions()
    judged = one_process.generate(prompt(5), replace(last, seed=0, n=1))
    assert list(answers[1].token_ids) == judged.token_ids


def test_one_completion_cannot_hold_several_answers(client):
    generation = client.generate(token_ids=prompt(5), sampling=SAMPLING)
    with generation, pytest.raises(InvalidArgumentError, match="completions"):
        generation.completion()
