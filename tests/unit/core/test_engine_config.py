"""What an engine is told is checked before anything starts."""

from pathlib import Path

import pytest

from splitserve.core.config import DTYPES, EngineConfig
from splitserve.core.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("dtype", "int8", "bfloat16"),
        ("quantization", "int4", "none, int8"),
        ("device", "tpu", "cpu"),
        ("threads", 0, "at least 1"),
    ],
)
def test_what_is_not_allowed_is_named_and_what_is(field, value, allowed):
    with pytest.raises(InvalidArgumentError, match=rf"{field}: .*{value}.*{allowed}"):
        EngineConfig(Path(), **{field: value})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_data_type_goes_with_8_bit_weights(dtype):
    assert EngineConfig(Path(), dtype, quantization="int8").quantization == "int8"
