"""Where weights come from: safetensors files, or made up."""

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from splitserve.core.errors import InvalidArgumentError, NotFoundError
from splitserve.model.part import Cut

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Weights(Protocol):
    """A model's tensors by name."""

    def read_into(self, out: Tensor, name: str, *cuts: Cut) -> None:
        """Copies a part of a tensor, in whatever data type ``out`` has.

        Args:
            out: Takes it.
            name: The tensor.
            cuts: For each of its axes, which part.

        Raises:
            InvalidArgumentError: It is missing, or has another shape.
        """


class CheckpointWeights:
    """The tensors of a directory's safetensors files; only what is asked for is read.

    Args:
        model_dir: Holds ``model.safetensors``, or several files and their index.

    Raises:
        NotFoundError: There are no weights.
        InvalidArgumentError: A file is corrupt.
    """

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir
        # What is mapped costs no memory of its own until it is read.
        self._handles = {file: _open(file) for file in _weight_files(model_dir)}
        self._file_of = {
            name: file for file, handle in self._handles.items() for name in handle.offset_keys()
        }

    def read_into(self, out: Tensor, name: str, *cuts: Cut) -> None:
        """Copies a part of a tensor; see `Weights`."""
        file = self._file_of.get(name)
        if file is None:
            raise InvalidArgumentError(f"{self._dir}: its weights have no tensor {name!r}")
        try:
            stored = self._handles[file].get_slice(name)
            shape, expected = list(stored.get_shape()), [cut.total for cut in cuts]
            if shape != expected:
                raise InvalidArgumentError(
                    f"{file}: tensor {name!r} has shape {shape}; its config asks for {expected}"
                )
            out.copy_(stored[tuple(slice(cut.begin, cut.end) for cut in cuts)])
        except SafetensorError as error:
            raise InvalidArgumentError(f"{file}: tensor {name!r} is corrupt: {error}") from error


class DummyWeights:
    """Random tensors that depend on the seed and the tensor's name only.

    Args:
        seed: Another seed is another model.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read_into(self, out: Tensor, name: str, *cuts: Cut) -> None:
        """Makes the whole tensor, so that every rank has its part of the same; see `Weights`."""
        whole = self._make(name, tuple(cut.total for cut in cuts))
        out.copy_(whole[tuple(slice(cut.begin, cut.end) for cut in cuts)])

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith("weight"):
            return torch.ones(shape)  # A norm's.
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
        return torch.from_numpy(values)


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
