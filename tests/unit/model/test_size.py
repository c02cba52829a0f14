"""A rank says what its weights take."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from splitserve.core.parallel import ParallelConfig
from splitserve.model.config import ModelConfig
from splitserve.model.group import TensorGroup
from splitserve.model.loader import load_decoder
from splitserve.model.part import ModelPart
from splitserve.model.size import weight_bytes

SLACK = 1.12
"""Frequencies, scales of norms, and rows that packing fills up; little in a model of real size."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_take_what_their_tensors_take(llama: Any, dtype: str) -> None:
    config = ModelConfig.from_dir(llama.path)
    assert not config.tie_word_embeddings
    count = sum(tensor.numel() for tensor in load_file(llama.path / "model.safetensors").values())
    exact = count * getattr(torch, dtype).itemsize
    assert exact <= weight_bytes(load_decoder(config, llama.path, dtype)) <= exact * SLACK


def test_ranks_share_them_out(llama: Any) -> None:
    config = ModelConfig.from_dir(llama.path)
    whole = weight_bytes(load_decoder(config, llama.path, "float32"))
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    sizes = [
        weight_bytes(
            load_decoder(
                config,
                llama.path,
                "float32",
                part=ModelPart.of(config, parallel, rank),
                group=TensorGroup(rank % 2, 2),
            )
        )
        for rank in range(6)
    ]
    assert whole <= sum(sizes) <= whole * SLACK
