"""Gemma 2 and 3 (text): norms on both sides of attention and MLP, windows in most layers.

Gemma Team, 2024 and 2025. Norm weights are stored less one, and embeddings are scaled up. Gemma 2
soft-caps scores and logits; Gemma 3 norms queries and keys instead, and rotates layers with a
window differently. The config says which.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from splitserve.model import llama
from splitserve.model.attention import Attention, HeadNorms, Step
from splitserve.model.builder import Builder
from splitserve.model.layers import Embedding, Head, RMSNorm
from splitserve.model.mlp import GatedMLP
from splitserve.model.registry import Family


@dataclass(frozen=True, slots=True)
class _Layer:
    """Attention and MLP between two norms each."""

    attention_norm: RMSNorm
    attention: Attention
    attention_out_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    mlp_out_norm: RMSNorm

    def __call__(self, hidden: Tensor, step: Step, index: int) -> Tensor:
        """See `Layer`."""
        mixed = self.attention(self.attention_norm(hidden), step, index)
        hidden = hidden + self.attention_out_norm(mixed)
        return hidden + self.mlp_out_norm(self.mlp(self.mlp_norm(hidden)))


def _embedding(build: Builder) -> Embedding:
    return build.embedding(llama.EMBEDDING, scale=math.sqrt(build.config.hidden_size))


def _layer(build: Builder, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    return _Layer(
        attention_norm=_norm(build, f"{prefix}.input_layernorm"),
        attention=_attention(build, index),
        attention_out_norm=_norm(build, f"{prefix}.post_attention_layernorm"),
        mlp_norm=_norm(build, f"{prefix}.pre_feedforward_layernorm"),
        mlp=llama.mlp(build, index),
        mlp_out_norm=_norm(build, f"{prefix}.post_feedforward_layernorm"),
    )


def _attention(build: Builder, index: int) -> Attention:
    config = build.config
    config.require("use_bidirectional_attention", None, False)
    norms = None
    if config.model_type == "gemma3_text":
        prefix = f"model.layers.{index}.self_attn"
        norms = HeadNorms(
            *(_norm(build, f"{prefix}.{name}", config.head_dim) for name in ("q_norm", "k_norm"))
        )
    return llama.attention(
        build,
        index,
        norms=norms,
        scale=float(config.raw["query_pre_attn_scalar"]) ** -0.5,
        softcap=config.raw.get("attn_logit_softcapping"),
    )


def _norm(build: Builder, name: str, width: int | None = None) -> RMSNorm:
    weight = build.tensor(f"{name}.weight", width or build.config.hidden_size)
    return RMSNorm(weight.float() + 1.0, build.config.norm_eps)


def _final_norm(build: Builder) -> RMSNorm:
    return _norm(build, "model.norm")


def _head(build: Builder) -> Head:
    name = llama.EMBEDDING if build.config.tie_word_embeddings else "lm_head"
    return build.head(name, softcap=build.config.raw.get("final_logit_softcapping"))


FAMILY = Family(embedding=_embedding, layer=_layer, final_norm=_final_norm, head=_head)
