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


def test_8_bits_are_half_of_bfloat16(llama: Any) -> None:
    config = ModelConfig.from_dir(llama.path)
    tensors = load_file(llama.path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight").numel() * 2
    exact = embedding + sum(tensor.numel() for tensor in tensors.values())
    # A scale for each output: here an output has fewer inputs than in a model of real size.
    scales = 4 * sum(tensor.shape[0] for tensor in tensors.values() if tensor.dim() == 2)
    size = weight_bytes(load_decoder(config, llama.path, "bfloat16", quantization="int8"))
    assert exact + scales <= size <= (exact + scales) * SLACK


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
