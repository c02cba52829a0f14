"""Weights of 8 bits: every family and layout computes with what they stand for, and no less."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_decoder import BLOCKS, prompt
from test_families import FAMILIES, TOLERANCE, answers, assert_answers
from test_family_ranks import assert_ranks_answer

from splitserve.model.config import ModelConfig
from splitserve.model.decoder import ModelInput
from splitserve.model.int8 import Int8Linear, channel_scales
from splitserve.model.loader import load_decoder


def rounded(weight: torch.Tensor, inputs: int) -> torch.nn.Parameter:
    """What is left of weights: 127 steps to either side, as large as each output needs."""
    step = weight.abs().amax(inputs, keepdim=True) / 127
    return torch.nn.Parameter(torch.round(weight / step) * step)


def round_weights(judge: Any) -> None:
    """Rounds the projections of a model of transformers; embeddings, norms and routers stay."""
    for module in judge.modules():
        if isinstance(module, torch.nn.Linear):
            # A new parameter: a head is no longer tied to its embedding.
            module.weight = rounded(module.weight.detach(), 1)
        elif type(module).__name__ == "Conv1D":
            module.weight = rounded(module.weight.detach(), 0)
        elif hasattr(module, "gate_up_proj") and hasattr(module.gate_up_proj, "shape"):
            for name in ("gate_up_proj", "down_proj"):  # Of all experts: [experts, out, in].
                setattr(module, name, rounded(getattr(module, name).detach(), 2))


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_as_transformers_does_with_rounded_weights(
    write_checkpoint: Callable[..., Any], name: str
) -> None:
    checkpoint = write_checkpoint(**FAMILIES[name])
    exact = checkpoint.log_probs(prompt(1, 20))
    round_weights(checkpoint.judge)
    assert float((checkpoint.log_probs(prompt(1, 20)) - exact).abs().max()) > 10 * TOLERANCE
    assert_answers(checkpoint, answers(checkpoint.load("int8")))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [("llama", 2, 1), ("llama", 2, 2), ("gpt2", 2, 1), ("mixtral", 2, 1)],
)
async def test_ranks_round_as_one_rank_does(
    write_checkpoint: Callable[..., Any], name: str, tensor: int, pipeline: int
) -> None:
    """Also where they share out the inputs of a projection, of which none sees whole rows."""
    checkpoint = write_checkpoint(**FAMILIES[name])
    round_weights(checkpoint.judge)
    await assert_ranks_answer(checkpoint, tensor, pipeline, "int8")


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_the_same_weights(llama: Any, dtype: str) -> None:
    config = ModelConfig.from_dir(llama.path)
    probabilities = {}
    for each in ("float32", dtype):
        decoder = load_decoder(config, llama.path, each, quantization="int8")
        cache = torch.zeros(30, 3, 2, 2, 8, 16, dtype=decoder.dtype)
        rows = [(prompt(7, 30), 0, BLOCKS, True)]
        probabilities[each] = decoder.forward(ModelInput.from_rows(rows, 8), cache).softmax(-1)
    difference = probabilities[dtype] - probabilities["float32"]
    assert float(difference.abs().max()) < 0.1


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [64, 77])
def test_a_layer_rounds_only_its_weights_and_its_result(dtype: torch.dtype, inputs: int) -> None:
    torch.manual_seed(inputs)
    weight = torch.randn(50, inputs)
    weight[3] = 0
    x, bias, residual = (torch.randn(*s).to(dtype) for s in ((9, inputs), (50,), (9, 50)))
    scales = channel_scales(weight)
    assert bool((scales > 0).all())
    kept = torch.round(weight / scales.unsqueeze(1)).double() * scales.unsqueeze(1)
    assert float((kept - weight).abs().max()) <= 0.5001 * float(scales.max())
    layer = Int8Linear(weight, scales, dtype, bias)
    got = layer(x, residual)
    assert got.dtype is dtype
    expected = x.double() @ kept.t() + bias + residual
    error = (got - expected).abs().max() / expected.abs().max()
    assert float(error) < torch.finfo(dtype).eps + 1e-5
    assert torch.equal(layer(x[:0]), got[:0])
