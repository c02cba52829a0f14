import pytest
from tiny_model import write_tiny_model

from splitserve.core.config import EngineConfig
from splitserve.core.errors import InvalidArgumentError, ResourceExhaustedError
from splitserve.core.parallel import ParallelConfig
from splitserve.engine.shape import DEFAULT_CACHE_TOKENS, NodeShape

PLENTY = 2**40


@pytest.fixture
def plan(tmp_path):
    """Plans a node for the tiny model made for so many tokens."""

    def plan(model_len: int, free_bytes: int = PLENTY, **options) -> NodeShape:
        model = write_tiny_model(tmp_path, max_position_embeddings=model_len)
        return NodeShape.plan(EngineConfig(model, dtype="float32", **options), free_bytes)

    return plan


def test_blocks_by_default_hold_a_few_long_requests(plan):
    assert plan(8192).num_blocks * 16 == DEFAULT_CACHE_TOKENS


@pytest.mark.parametrize(
    ("options", "tokens"), [({}, 131_072), ({"max_model_len": 40_001}, 40_016)]
)
def test_blocks_by_default_hold_the_longest_request(plan, options, tokens):
    assert plan(131_072, **options).num_blocks * 16 == tokens


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(2, 2)])
def test_blocks_by_default_take_at_most_a_quarter_of_the_memory(plan, parallel):
    block_bytes = sum(layout.block_bytes for layout in plan(8192, parallel=parallel).layouts)
    assert plan(8192, 1000 * block_bytes, parallel=parallel).num_blocks == 250
    with pytest.raises(ResourceExhaustedError, match="num_blocks"):
        plan(8192, 3 * block_bytes, parallel=parallel)


def test_an_explicit_number_of_blocks_is_taken_as_it_is(plan):
    assert plan(8192, 1, num_blocks=3).num_blocks == 3


def test_the_length_by_default_is_the_models_as_far_as_the_blocks_hold_it(plan):
    assert plan(8192, num_blocks=1000).max_model_len == 8192
    assert plan(8192, num_blocks=100).max_model_len == 1600


def test_an_explicit_length_that_does_not_fit_says_what_does(plan):
    assert plan(8192, num_blocks=100, max_model_len=1600).max_model_len == 1600
    with pytest.raises(InvalidArgumentError, match=r"max_model_len: 1601.*hold 1600 tokens"):
        plan(8192, num_blocks=100, max_model_len=1601)
    with pytest.raises(InvalidArgumentError, match=r"max_model_len: 9000.*8192 tokens"):
        plan(8192, num_blocks=1000, max_model_len=9000)
