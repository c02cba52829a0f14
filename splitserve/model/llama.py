"""Llama and its kin: Llama 2 and 3, SmolLM2, TinyLlama, Mistral.

Touvron et al., 2023, with shared KV heads; Mistral adds a sliding window.
"""

from splitserve.model.attention import Attention
from splitserve.model.builder import Builder
from splitserve.model.decoder import DecoderLayer
from splitserve.model.layers import Embedding, GatedMLP, Head, RMSNorm
from splitserve.model.part import Cut
from splitserve.model.registry import Family

_EMBEDDING = "model.embed_tokens"


def _embedding(build: Builder) -> Embedding:
    return build.embedding(_EMBEDDING)


def _layer(build: Builder, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    return DecoderLayer(
        attention_norm=_norm(build, f"{prefix}.input_layernorm"),
        attention=_attention(build, f"{prefix}.self_attn"),
        mlp_norm=_norm(build, f"{prefix}.post_attention_layernorm"),
        mlp=_mlp(build, f"{prefix}.mlp"),
    )


def _attention(build: Builder, prefix: str) -> Attention:
    config = build.config
    heads, kv_heads = build.part.heads, build.part.kv_heads
    queries, kv = heads.times(config.head_dim), kv_heads.times(config.head_dim)
    qkv = [(f"{prefix}.q_proj", queries), (f"{prefix}.k_proj", kv), (f"{prefix}.v_proj", kv)]
    bias = config.attention_bias
    return Attention(
        build.split_linear(qkv, config.hidden_size, bias=bias),
        build.summed_linear(f"{prefix}.o_proj", config.hidden_size, queries, bias=bias),
        heads.size,
        kv_heads.size,
        config.head_dim,
    )


def _mlp(build: Builder, prefix: str) -> GatedMLP:
    config = build.config
    inner: Cut = build.part.share(config.intermediate_size)
    gate_up = [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)]
    return GatedMLP(
        build.split_linear(gate_up, config.hidden_size, bias=config.mlp_bias),
        build.summed_linear(f"{prefix}.down_proj", config.hidden_size, inner, bias=config.mlp_bias),
        config.hidden_act,
    )


def _norm(build: Builder, name: str) -> RMSNorm:
    weight = build.tensor(f"{name}.weight", build.config.hidden_size)
    return RMSNorm(weight, build.config.rms_norm_eps)


def _final_norm(build: Builder) -> RMSNorm:
    return _norm(build, "model.norm")


def _head(build: Builder) -> Head:
    return build.head(_EMBEDDING if build.config.tie_word_embeddings else "lm_head")


FAMILY = Family(embedding=_embedding, layer=_layer, final_norm=_final_norm, head=_head)
