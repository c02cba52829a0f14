from pathlib import Path

import pytest

from splitserve.core.config import EngineConfig
from splitserve.core.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.engine.capacity import (
    DEFAULT_CACHE_TOKENS,
    choose_max_model_len,
    choose_num_blocks,
)
from splitserve.kv.layout import KVLayout

LAYOUT = KVLayout(2, 2, 16, 16, "float32", 0, 2, 0, 2)
PLENTY = 2**40


def config(**options) -> EngineConfig:
    return EngineConfig(Path("model"), **options)


def test_blocks_by_default_hold_a_few_long_requests():
    assert choose_num_blocks(config(), LAYOUT, 8192, PLENTY) * 16 == DEFAULT_CACHE_TOKENS


@pytest.mark.parametrize(
    ("options", "model_len", "tokens"),
    [({}, 131_072, 131_072), ({"max_model_len": 40_001}, 131_072, 40_016)],
)
def test_blocks_by_default_hold_the_longest_request(options, model_len, tokens):
    assert choose_num_blocks(config(**options), LAYOUT, model_len, PLENTY) * 16 == tokens


def test_blocks_by_default_take_at_most_a_quarter_of_the_memory():
    free = 1000 * LAYOUT.block_bytes
    assert choose_num_blocks(config(), LAYOUT, 8192, free) == 250
    with pytest.raises(ResourceExhaustedError, match="num_blocks"):
        choose_num_blocks(config(), LAYOUT, 8192, 3 * LAYOUT.block_bytes)


def test_an_explicit_number_of_blocks_is_taken_as_it_is():
    assert choose_num_blocks(config(num_blocks=3), LAYOUT, 8192, 1) == 3


def test_the_length_by_default_is_the_models_as_far_as_the_blocks_hold_it():
    assert choose_max_model_len(config(), LAYOUT, 8192, 1000) == 8192
    assert choose_max_model_len(config(), LAYOUT, 8192, 100) == 1600


def test_an_explicit_length_that_does_not_fit_says_what_does():
    assert choose_max_model_len(config(max_model_len=1600), LAYOUT, 8192, 100) == 1600
    with pytest.raises(InvalidArgumentError, match=r"max_model_len: 1601.*hold 1600 tokens"):
        choose_max_model_len(config(max_model_len=1601), LAYOUT, 8192, 100)
    with pytest.raises(InvalidArgumentError, match=r"max_model_len: 9000.*8192 tokens"):
        choose_max_model_len(config(max_model_len=9000), LAYOUT, 8192, 1000)
