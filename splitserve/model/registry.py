"""Which architectures there are and who builds them. Free of torch until a family is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.core.errors import invalid

if TYPE_CHECKING:
    from splitserve.model.builder import Builder
    from splitserve.model.decoder import Layer
    from splitserve.model.layers import Embedding, Head, Norm

_FAMILY_MODULES = {
    "GPT2LMHeadModel": "splitserve.model.gpt2",
    "GPTNeoXForCausalLM": "splitserve.model.gpt_neox",
    "Gemma2ForCausalLM": "splitserve.model.gemma",
    "Gemma3ForCausalLM": "splitserve.model.gemma",
    "LlamaForCausalLM": "splitserve.model.llama",
    "MistralForCausalLM": "splitserve.model.llama",
    "MixtralForCausalLM": "splitserve.model.mixtral",
    "OPTForCausalLM": "splitserve.model.opt",
    "Phi3ForCausalLM": "splitserve.model.phi3",
    "Qwen2ForCausalLM": "splitserve.model.qwen2",
    "Qwen3ForCausalLM": "splitserve.model.qwen3",
    "Qwen3MoeForCausalLM": "splitserve.model.qwen3_moe",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of decoders differs from the others: how its parts are built.

    Parts are built one by one, so that a loader can tell its progress and a stage of a pipeline
    builds only its own.

    Attributes:
        embedding: Token ids to the first layer's input.
        layer: One decoder layer, by its index in the model.
        final_norm: The norm before the head.
        head: From hidden states to logits.
    """

    embedding: "Callable[[Builder], Embedding]"
    layer: "Callable[[Builder, int], Layer]"
    final_norm: "Callable[[Builder], Norm]"
    head: "Callable[[Builder], Head]"


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
