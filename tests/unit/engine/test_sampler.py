import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.errors import InternalError
from splitserve.core.sampling import SamplingParams
from splitserve.engine.batch import SampleSpec
from splitserve.engine.sampler import sample, uniform

DRAWS = (0.011546754286331562, 0.3216202470970606)
VOCAB = 700  # more than two of the sampler's chunks, and not a multiple of one


def spec(position: int = 5, prompt=(), output=(), **params) -> SampleSpec:
    return SampleSpec(SamplingParams(**{"seed": 1, **params}), position, prompt, output)


def one(logits, spec: SampleSpec) -> int:
    return sample(torch.as_tensor(logits, dtype=torch.float32)[None], [spec])[0].token_id


def random_logits(seed: int, rows: int = 1, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def reference_probabilities(logits: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """What each token's probability ought to be, the slow and plain way."""
    params, x = spec.params, logits.astype(np.float64)
    for token in set(spec.prompt_ids) | set(spec.output_ids):
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in spec.output_ids:
        x[token] -= params.frequency_penalty
    for token in set(spec.output_ids):
        x[token] -= params.presence_penalty
    x = x / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    by_rank = np.argsort(-p, kind="stable")
    if params.top_k:
        p[by_rank[params.top_k :]] = 0
    p /= p.sum()
    reached = 0.0
    for token in by_rank:
        if reached >= params.top_p:
            p[token] = 0
        reached += p[token]
    return p / p.sum()


def reference_token(logits: np.ndarray, spec: SampleSpec) -> int:
    totals = np.cumsum(reference_probabilities(logits, spec))
    return int(np.searchsorted(totals, uniform(spec) * totals[-1], side="right"))


any_params = st.builds(
    dict,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 50, VOCAB, 10 * VOCAB]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(any_params, st.integers(0, 10_000), st.integers(0, 2**31))
def test_every_combination_of_filters_draws_what_the_plain_algorithm_draws(
    params, position, logits_seed
):
    logits = random_logits(logits_seed)
    wish = spec(position, prompt=(3, 9, 3), output=(9, 11, 11), **params)
    assert one(logits[0], wish) == reference_token(logits[0].numpy(), wish)


@settings(max_examples=30, deadline=None)
@given(st.lists(any_params, min_size=2, max_size=6), st.integers(0, 2**31))
def test_a_row_gets_the_same_token_alone_and_in_any_company(all_params, logits_seed):
    logits = random_logits(logits_seed, len(all_params))
    wishes = [spec(7, (1, 2), (2,), logprobs=3, **params) for params in all_params]
    together = sample(logits, wishes)
    assert together == [
        sample(row[None], [wish])[0] for row, wish in zip(logits, wishes, strict=True)
    ]
    assert together[::-1] == sample(logits.flip(0), wishes[::-1])


def test_logits_are_left_as_they_are():
    logits = random_logits(0, 2)
    before = logits.clone()
    sample(logits, [spec(prompt=(1,), output=(2,), repetition_penalty=2.0, top_k=3), spec()])
    assert torch.equal(logits, before)


def test_nothing_to_sample_is_nothing_sampled():
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"presence_penalty": 1.0, "repetition_penalty": 1.5},
    ],
)
def test_frequencies_follow_the_probabilities(params):
    logits = torch.tensor([2.0, 1.5, -1.0, 1.5, 0.0, -3.0, 0.7, 1.0])
    draws = 4_000
    wishes = [spec(position, (0,), (1, 1), **params) for position in range(draws)]
    counts = np.bincount(
        [token.token_id for token in sample(logits.expand(draws, -1).contiguous(), wishes)],
        minlength=len(logits),
    )
    expected = draws * reference_probabilities(logits.numpy(), wishes[0])
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # Beyond this once in a million for seven degrees of freedom; the seed is fixed.
    assert chi_square < 40


def test_draws_of_neighbouring_seeds_and_positions_are_unrelated():
    draws = np.array([[uniform(spec(p, seed=s)) for p in range(200)] for s in range(50)])
    assert len(np.unique(draws)) == draws.size
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.05
    assert draws.min() >= 0
    assert draws.max() < 1


def test_a_draw_never_changes_between_releases():
    # Failover and tests elsewhere count on it.
    assert uniform(spec(0, seed=0)) == pytest.approx(DRAWS[0], abs=0)
    assert uniform(spec(4095, seed=2**64 - 1)) == pytest.approx(DRAWS[1], abs=0)


def test_greedy_takes_the_best_and_of_equals_the_first():
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, [30, 20, 600]] = 4.0
    assert sample(logits, [spec(temperature=0.0, seed=None)])[0].token_id == 20


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}])
def test_the_tightest_filter_is_greedy_also_among_equals(params):
    logits = torch.full((VOCAB,), -1.0)
    logits[[30, 20, 600]] = 4.0
    assert {one(logits, spec(position, **params)) for position in range(50)} == {20}


def test_min_p_of_one_keeps_all_the_best():
    logits = torch.full((VOCAB,), -1.0)
    logits[[30, 20, 600]] = 4.0
    assert {one(logits, spec(position, min_p=1.0)) for position in range(50)} == {20, 30, 600}


def test_top_k_among_equals_keeps_exactly_k_the_first_by_id():
    assert {one(torch.zeros(VOCAB), spec(p, top_k=3)) for p in range(200)} == {0, 1, 2}


def test_top_p_among_equals_keeps_just_enough():
    logits = torch.zeros(10)
    assert {one(logits, spec(p, top_p=0.35)) for p in range(300)} == {0, 1, 2, 3}


def test_a_flat_vocabulary_is_drawn_from_end_to_end():
    drawn = {one(torch.zeros(VOCAB), spec(position)) for position in range(4_000)}
    assert min(drawn) == 0
    assert max(drawn) == VOCAB - 1


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((VOCAB,), -math.inf)
    logits[[0, 300, 699]] = 0.0
    assert {one(logits, spec(p)) for p in range(100)} == {0, 300, 699}


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = random_logits(3)[0]
    assert one(logits, spec(temperature=temperature)) == int(logits.argmax())


@pytest.mark.parametrize("factor", [1e-300, 10.0])
def test_no_clients_penalty_breaks_the_step(factor):
    logits = random_logits(3, scale=30.0)
    everything = tuple(range(VOCAB))
    for temperature in (0.0, 1.0):
        wish = spec(
            prompt=everything,
            output=everything * 3,
            repetition_penalty=factor,
            frequency_penalty=2.0,
            temperature=temperature,
        )
        assert 0 <= one(logits[0], wish) < VOCAB


def test_penalties_count_what_they_say_they_count():
    logits = torch.zeros(4)
    logits[0], logits[1], logits[2] = 3.0, 2.0, 1.0
    greedy = {"temperature": 0.0}
    # Frequency: once per occurrence in the answer.
    assert one(logits, spec(output=(0, 0), frequency_penalty=0.6, **greedy)) == 1
    assert one(logits, spec(output=(0,), frequency_penalty=0.6, **greedy)) == 0
    # Presence: once, however often.
    assert one(logits, spec(output=(0, 0, 0), presence_penalty=0.9, **greedy)) == 0
    assert one(logits, spec(output=(0,), presence_penalty=1.1, **greedy)) == 1
    # Neither counts the prompt; repetition does.
    assert one(logits, spec(prompt=(0, 0), presence_penalty=2.0, **greedy)) == 0
    assert one(logits, spec(prompt=(0,), repetition_penalty=2.0, **greedy)) == 1
    # Repetition makes a negative logit more negative, not less.
    assert one(-logits[:3], spec(prompt=(2,), repetition_penalty=4.0, **greedy)) == 1


def test_logprobs_are_the_unmodified_models():
    logits = random_logits(4)
    wish = spec(logprobs=4, temperature=0.2, top_k=2, output=(1,), presence_penalty=2.0)
    got = sample(logits, [wish])[0]
    expected = torch.log_softmax(logits[0].double(), -1)
    assert got.logprob == pytest.approx(expected[got.token_id].item(), abs=1e-6)
    best = expected.topk(4)
    assert [token for token, _ in got.top] == best.indices.tolist()
    np.testing.assert_allclose([value for _, value in got.top], best.values, atol=1e-6)


def test_logprobs_only_where_asked_for():
    logits = random_logits(5, 3)
    plain = spec(temperature=0.0)
    with_own = replace(plain, params=replace(plain.params, logprobs=0))
    with_top = replace(plain, params=replace(plain.params, logprobs=20))
    got = sample(logits, [plain, with_own, with_top])
    assert (got[0].logprob, got[0].top) == (0.0, ())
    assert got[1].logprob < 0
    assert got[1].top == ()
    assert len(got[2].top) == 20
    assert got[2].top[0] == (got[2].token_id, got[2].logprob)


def test_more_logprobs_than_tokens_are_all_tokens():
    got = sample(torch.tensor([[0.0, 1.0, 1.0]]), [spec(logprobs=20, temperature=0.0)])[0]
    assert [token for token, _ in got.top] == [1, 2, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_computes_nonsense_is_found_out(bad):
    logits = random_logits(6, 2)
    logits[1, 17] = bad
    with pytest.raises(InternalError, match="not finite"):
        sample(logits, [spec(), spec(temperature=0.0)])
