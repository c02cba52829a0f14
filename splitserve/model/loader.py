"""Weights from safetensors files, or made up, into a decoder."""

import json
import math
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from splitserve.core.errors import InvalidArgumentError, NotFoundError
from splitserve.model.config import ModelConfig
from splitserve.model.decoder import Decoder
from splitserve.model.layers import Rope
from splitserve.model.registry import Weights, family_of

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_decoder(
    config: ModelConfig,
    model_dir: Path,
    dtype: str,
    *,
    dummy_seed: int | None,
    progress: Callable[[int, int], None] | None,
) -> Decoder:
    """Builds a model, tensor by tensor: no two copies of it are ever in memory.

    Args:
        config: The model.
        model_dir: Where its weights are.
        dtype: Data type to compute in, for example ``"float32"``.
        dummy_seed: Makes weights up from this seed; None reads them.
        progress: Told the layers done, and all layers.

    Raises:
        NotFoundError: There are no weights.
        InvalidArgumentError: A file is corrupt, or a tensor is missing or has another shape.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    weights: Weights = (
        CheckpointWeights(model_dir, torch_dtype)
        if dummy_seed is None
        else DummyWeights(dummy_seed, torch_dtype)
    )
    family = family_of(config.architecture)
    embedding = family.embedding(config, weights)
    layers = []
    for index in range(config.num_layers):
        layers.append(family.layer(config, weights, index))
        if progress is not None:
            progress(index + 1, config.num_layers)
    return Decoder(
        embedding,
        layers,
        family.final_norm(config, weights),
        family.head(config, weights, embedding),
        Rope(config.rope, config.head_dim, torch_dtype),
        config.num_heads,
        config.sliding_window,
    )


class CheckpointWeights:
    """The tensors of a directory's safetensors files.

    Args:
        model_dir: Holds ``model.safetensors``, or several files and their index.
        dtype: What tensors are turned into.

    Raises:
        NotFoundError: There are no weights.
        InvalidArgumentError: A file is corrupt.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._dir = model_dir
        # What is mapped costs no memory of its own until it is read.
        self._handles = {file: _open(file) for file in _weight_files(model_dir)}
        self._file_of = {
            name: file for file, handle in self._handles.items() for name in handle.offset_keys()
        }

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor; see `Weights`."""
        out = torch.empty(shape, dtype=self._dtype)
        self._read_into(name, out)
        return out

    def stacked(self, rows: dict[str, int], *columns: int) -> Tensor:
        """Several tensors as one; see `Weights`."""
        out = torch.empty(sum(rows.values()), *columns, dtype=self._dtype)
        for name, part in zip(rows, torch.split(out, list(rows.values())), strict=True):
            self._read_into(name, part)
        return out

    def _read_into(self, name: str, out: Tensor) -> None:
        file = self._file_of.get(name)
        if file is None:
            raise InvalidArgumentError(f"{self._dir}: its weights have no tensor {name!r}")
        try:
            value = self._handles[file].get_tensor(name)
        except SafetensorError as error:
            raise InvalidArgumentError(f"{file}: tensor {name!r} is corrupt: {error}") from error
        if value.shape != out.shape:
            raise InvalidArgumentError(
                f"{file}: tensor {name!r} has shape {list(value.shape)}; "
                f"its config asks for {list(out.shape)}"
            )
        out.copy_(value)


class DummyWeights:
    """Random tensors that depend on the seed and the tensor's name only.

    Args:
        seed: Another seed is another model.
        dtype: What tensors are made in.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self._dtype = dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor; see `Weights`."""
        if len(shape) == 1:
            # A norm's weight; biases come stacked.
            return torch.ones(shape, dtype=self._dtype)
        return self._random(name, *shape)

    def stacked(self, rows: dict[str, int], *columns: int) -> Tensor:
        """Several tensors as one; see `Weights`."""
        return torch.cat([self._random(name, count, *columns) for name, count in rows.items()])

    def _random(self, name: str, *shape: int) -> Tensor:
        seed = int.from_bytes(sha256(f"{self._seed}/{name}".encode()).digest()[:16], "little")
        # Uniform numbers need two exact roundings each: the same bits on every processor, which
        # normal ones, made with vector instructions, don't promise.
        values = np.random.Generator(np.random.PCG64(seed)).random(shape, dtype=np.float32)
        values -= np.float32(0.5)
        # Layers much louder than the embedding drown the token's own, to which a tied head would
        # answer with that same token for ever; and attention that picks instead of averaging
        # lets answers depend on the prompt and go round in no short circles.
        spread = 1.5 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.02
        if "embed" in name:
            spread = 0.02
        values *= np.float32(spread * math.sqrt(12.0))
        return torch.from_numpy(values).to(self._dtype)


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(f"{index} is not an index of weights: {error}") from error
        return [model_dir / name for name in names]
    if (model_dir / WEIGHTS_FILE).is_file():
        return [model_dir / WEIGHTS_FILE]
    raise NotFoundError(
        f"{model_dir} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; "
        "`splitserve model import` turns other formats into this one"
    )


def _open(file: Path) -> Any:
    if not file.is_file():
        raise NotFoundError(f"{file} does not exist, but {INDEX_FILE} names it")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidArgumentError(f"{file} is truncated or corrupt: {error}") from error
