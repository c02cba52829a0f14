"""Llama 2 and 3, SmolLM2, TinyLlama, Mistral; and what other families have in common with them.

Touvron et al., 2023, with shared KV heads; Mistral adds a sliding window.
"""

from collections.abc import Callable

from splitserve.model.attention import Attention, HeadNorms
from splitserve.model.builder import Builder, Rows
from splitserve.model.decoder import DecoderLayer, Layer, TokenMLP
from splitserve.model.layers import Embedding, Head, Norm
from splitserve.model.mlp import GatedMLP
from splitserve.model.registry import Family

EMBEDDING = "model.embed_tokens"


def attention(
    build: Builder,
    index: int,
    *,
    rows: list[Rows] | None = None,
    qkv_bias: bool | None = None,
    norms: HeadNorms | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Attention:
    """A layer's attention.

    Args:
        build: The builder.
        index: The layer.
        rows: Where queries, keys and values are projected, if not in three tensors.
        qkv_bias: Whether those have a bias; None for what the config says of all projections.
        norms: See `Attention`, as for the others.
        scale: –
        softcap: –
    """
    config, part = build.config, build.part
    prefix = f"model.layers.{index}.self_attn"
    queries, kv = part.heads.times(config.head_dim), part.kv_heads.times(config.head_dim)
    if rows is None:
        cuts = {"q_proj": queries, "k_proj": kv, "v_proj": kv}
        rows = [(f"{prefix}.{name}", cut) for name, cut in cuts.items()]
    bias = config.attention_bias if qkv_bias is None else qkv_bias
    return Attention(
        build.split_linear(rows, config.hidden_size, bias=bias),
        build.summed_linear(
            f"{prefix}.o_proj", config.hidden_size, queries, bias=config.attention_bias
        ),
        part.heads.size,
        part.kv_heads.size,
        config.head_dim,
        rope=build.rope(index),
        window=config.window(index),
        norms=norms,
        scale=scale,
        softcap=softcap,
    )


def head_norms(build: Builder, index: int) -> HeadNorms:
    """A layer's norms of queries and keys, for families that have them."""
    prefix, width = f"model.layers.{index}.self_attn", build.config.head_dim
    return HeadNorms(
        build.rms_norm(f"{prefix}.q_norm", width), build.rms_norm(f"{prefix}.k_norm", width)
    )


def mlp(build: Builder, index: int) -> GatedMLP:
    """A layer's MLP."""
    config = build.config
    prefix = f"model.layers.{index}.mlp"
    inner = build.part.share(config.intermediate_size)
    gate_up = [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)]
    return GatedMLP(
        build.split_linear(gate_up, config.hidden_size, bias=config.mlp_bias),
        build.summed_linear(f"{prefix}.down_proj", config.hidden_size, inner, bias=config.mlp_bias),
        config.hidden_act,
    )


def family(
    attention: Callable[[Builder, int], Attention] = attention,
    mlp: Callable[[Builder, int], TokenMLP] = mlp,
) -> Family:
    """A family like Llama, but for how attention or MLP are built."""

    def layer(build: Builder, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        return DecoderLayer(
            attention_norm=build.rms_norm(f"{prefix}.input_layernorm"),
            attention=attention(build, index),
            mlp_norm=build.rms_norm(f"{prefix}.post_attention_layernorm"),
            mlp=mlp(build, index),
        )

    return Family(embedding=_embedding, layer=layer, final_norm=_final_norm, head=_head)


def _embedding(build: Builder) -> Embedding:
    return build.embedding(EMBEDDING)


def _final_norm(build: Builder) -> Norm:
    return build.rms_norm("model.norm")


def _head(build: Builder) -> Head:
    return build.head(EMBEDDING if build.config.tie_word_embeddings else "lm_head")


FAMILY = family()
