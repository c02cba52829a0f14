"""GPT-NeoX (Black et al., 2022): attention and MLP beside each other, parts of heads rotated."""

from dataclasses import dataclass

from torch import Tensor

from splitserve.model.attention import Attention, Step
from splitserve.model.builder import Builder
from splitserve.model.decoder import DecoderLayer, Layer
from splitserve.model.layers import Embedding, Head, Norm
from splitserve.model.mlp import PlainMLP
from splitserve.model.part import Cut
from splitserve.model.registry import Family

_EMBEDDING = "gpt_neox.embed_in"


@dataclass(frozen=True, slots=True)
class _ParallelLayer:
    """Attention and MLP of the same hidden states, both added to them."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: PlainMLP

    def __call__(self, hidden: Tensor, step: Step, index: int) -> Tensor:
        """See `Layer`."""
        mixed = self.attention(self.attention_norm(hidden), step, index, hidden)
        return self.mlp(self.mlp_norm(hidden), mixed)


def _embedding(build: Builder) -> Embedding:
    return build.embedding(_EMBEDDING)


def _layer(build: Builder, index: int) -> Layer:
    prefix = f"gpt_neox.layers.{index}"
    parallel = build.config.raw.get("use_parallel_residual", True)
    return (_ParallelLayer if parallel else DecoderLayer)(
        attention_norm=build.layer_norm(f"{prefix}.input_layernorm"),
        attention=_attention(build, f"{prefix}.attention", index),
        mlp_norm=build.layer_norm(f"{prefix}.post_attention_layernorm"),
        mlp=_mlp(build, f"{prefix}.mlp"),
    )


def _attention(build: Builder, prefix: str, index: int) -> Attention:
    config, heads = build.config, build.part.heads
    size, bias = config.head_dim, bool(config.raw.get("attention_bias", True))
    # Each head's query, key and value lie together; we have all queries first.
    rows = [
        (f"{prefix}.query_key_value", Cut(begin, begin + size, 3 * heads.total * size))
        for kind in range(3)
        for head in range(heads.begin, heads.end)
        for begin in [(3 * head + kind) * size]
    ]
    return Attention(
        build.split_linear(rows, config.hidden_size, bias=bias),
        build.summed_linear(f"{prefix}.dense", config.hidden_size, heads.times(size), bias=bias),
        heads.size,
        heads.size,
        size,
        rope=build.rope(index),
    )


def _mlp(build: Builder, prefix: str) -> PlainMLP:
    config = build.config
    inner = build.part.share(config.intermediate_size)
    return PlainMLP(
        build.split_linear([(f"{prefix}.dense_h_to_4h", inner)], config.hidden_size, bias=True),
        build.summed_linear(f"{prefix}.dense_4h_to_h", config.hidden_size, inner, bias=True),
        config.hidden_act,
    )


def _final_norm(build: Builder) -> Norm:
    return build.layer_norm("gpt_neox.final_layer_norm")


def _head(build: Builder) -> Head:
    return build.head(_EMBEDDING if build.config.tie_word_embeddings else "embed_out")


FAMILY = Family(embedding=_embedding, layer=_layer, final_norm=_final_norm, head=_head)
