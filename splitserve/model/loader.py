"""Builds a rank's part of a model from a checkpoint, or makes its weights up."""

from collections.abc import Callable
from pathlib import Path

import torch

from splitserve.model.builder import Builder
from splitserve.model.config import ModelConfig
from splitserve.model.decoder import Decoder
from splitserve.model.group import ALONE, TensorGroup
from splitserve.model.part import ModelPart
from splitserve.model.registry import family_of
from splitserve.model.weights import CheckpointWeights, DummyWeights, Weights


def load_decoder(
    config: ModelConfig,
    model_dir: Path,
    dtype: str,
    *,
    part: ModelPart | None = None,
    group: TensorGroup = ALONE,
    dummy_seed: int | None = None,
    quantization: str = "none",
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Builds a part of a model, tensor by tensor: no two copies of it are ever in memory.

    Args:
        config: The model.
        model_dir: Where its weights are.
        dtype: Data type to compute in, for example ``"float32"``.
        part: What this rank holds; None for all.
        group: The ranks it shares layers with.
        dummy_seed: Makes weights up from this seed; None reads them.
        quantization: How linear layers keep their weights: ``none`` or ``int8``.
        progress: Told the layers done, and all layers of this part.

    Raises:
        NotFoundError: There are no weights.
        InvalidArgumentError: A file is corrupt, or a tensor is missing or has another shape.
    """
    part = part or ModelPart.whole(config)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    weights: Weights = (
        CheckpointWeights(model_dir) if dummy_seed is None else DummyWeights(dummy_seed)
    )
    family = family_of(config.architecture)
    build = Builder(config, part, group, weights, torch_dtype, quantization)
    layers = []
    for index in range(part.layers.begin, part.layers.end):
        layers.append(family.layer(build, index))
        if progress is not None:
            progress(len(layers), part.layers.size)
    return Decoder(
        family.embedding(build) if part.is_first else None,
        layers,
        family.final_norm(build) if part.is_last else None,
        family.head(build) if part.is_last else None,
        torch_dtype,
    )
