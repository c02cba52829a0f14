"""Bad parameters are refused where they are made, by field, value and what is allowed."""

import math

import pytest

from splitserve.core.errors import InvalidArgumentError
from splitserve.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", 0, "an integer from 1"),
        ("max_tokens", -1, "an integer from 1"),
        ("max_tokens", 1.5, "an integer from 1"),
        ("temperature", -0.1, "[0, 100]"),
        ("temperature", math.nan, "[0, 100]"),
        ("temperature", math.inf, "[0, 100]"),
        ("temperature", True, "[0, 100]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_p", math.nan, "(0, 1]"),
        ("top_k", -1, "an integer from 0"),
        ("min_p", 1.1, "[0, 1]"),
        ("seed", -1, "an integer from 0"),
        ("seed", 2**64, "an integer from 0"),
        ("presence_penalty", 2.5, "[-2, 2]"),
        ("frequency_penalty", -2.5, "[-2, 2]"),
        ("repetition_penalty", 0.0, "(0, 10]"),
        ("logprobs", 21, "an integer from 0 to 20"),
        ("n", 129, "an integer from 1 to 128"),
        ("n", 0, "an integer from 1 to 128"),
        ("stop", ("",), "1 to 1000 characters"),
        ("stop", "text", "a sequence of strings"),
        ("stop_token_ids", (-1,), "an integer from 0"),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value, allowed):
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{field: value})
    message = caught.value.message
    assert message.startswith(f"{field}: ")
    assert allowed in message


def test_too_many_stops_are_refused():
    with pytest.raises(InvalidArgumentError, match="stop: 17"):
        SamplingParams(stop=("x",) * 17)
    with pytest.raises(InvalidArgumentError, match="stop_token_ids: 129"):
        SamplingParams(stop_token_ids=(1,) * 129)


def test_lists_become_tuples_so_that_a_value_cannot_change():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert params.stop == ("a",)
    assert params.stop_token_ids == (1,)


def test_the_bounds_themselves_are_allowed():
    SamplingParams(max_tokens=1, temperature=0, top_p=1, min_p=1, seed=2**64 - 1, logprobs=20)
