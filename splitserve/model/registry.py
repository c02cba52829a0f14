"""Which architectures there are and who builds them. Free of torch until a family is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from splitserve.core.errors import invalid

if TYPE_CHECKING:
    import torch

    from splitserve.model.config import ModelConfig
    from splitserve.model.decoder import DecoderLayer
    from splitserve.model.layers import Linear, RMSNorm

_FAMILY_MODULES = {
    "LlamaForCausalLM": "splitserve.model.llama",
    "MistralForCausalLM": "splitserve.model.llama",
}


class Weights(Protocol):
    """A checkpoint's tensors, in the data type the model computes in."""

    def tensor(self, name: str, *shape: int) -> "torch.Tensor":
        """One tensor.

        Raises:
            InvalidArgumentError: It is missing, or has another shape.
        """

    def stacked(self, rows: dict[str, int], *columns: int) -> "torch.Tensor":
        """Several tensors as one, joined along the first axis.

        Args:
            rows: How many rows each of the named tensors has, in the order they are joined.
            columns: Shape of a row; nothing for biases.
        """


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of decoders differs from the others: how its parts are built.

    Parts are built one by one, so that a loader can tell its progress and a rank of a pipeline
    can build only its own.

    Attributes:
        embedding: The table ``[V, E]`` of token embeddings.
        layer: One decoder layer, by its index.
        final_norm: The norm before the head.
        head: From hidden states to logits; gets the embedding table, to which it may be tied.
    """

    embedding: "Callable[[ModelConfig, Weights], torch.Tensor]"
    layer: "Callable[[ModelConfig, Weights, int], DecoderLayer]"
    final_norm: "Callable[[ModelConfig, Weights], RMSNorm]"
    head: "Callable[[ModelConfig, Weights, torch.Tensor], Linear]"


def architectures() -> tuple[str, ...]:
    """The names that may stand in ``config.json``."""
    return tuple(sorted(_FAMILY_MODULES))


def check_architecture(architecture: str) -> None:
    """Raises `InvalidArgumentError`, listing the known ones, unless this one is known."""
    if architecture not in _FAMILY_MODULES:
        raise invalid("architecture", architecture, ", ".join(architectures()))


def family_of(architecture: str) -> Family:
    """The family that builds an architecture. Imports torch.

    Raises:
        InvalidArgumentError: The architecture is unknown.
    """
    check_architecture(architecture)
    family: Family = importlib.import_module(_FAMILY_MODULES[architecture]).FAMILY
    return family
