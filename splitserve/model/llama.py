"""Llama and its kin: Llama 2 and 3, SmolLM2, TinyLlama, Mistral.

Touvron et al., 2023, with shared KV heads; Mistral adds a sliding window.
"""

from torch import Tensor

from splitserve.model.attention import Attention
from splitserve.model.config import ModelConfig
from splitserve.model.decoder import DecoderLayer
from splitserve.model.layers import GatedMLP, Linear, RMSNorm
from splitserve.model.registry import Family, Weights


def _embedding(config: ModelConfig, weights: Weights) -> Tensor:
    return weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)


def _layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    return DecoderLayer(
        attention_norm=_norm(config, weights, f"{prefix}.input_layernorm"),
        attention=_attention(config, weights, f"{prefix}.self_attn"),
        mlp_norm=_norm(config, weights, f"{prefix}.post_attention_layernorm"),
        mlp=_mlp(config, weights, f"{prefix}.mlp"),
    )


def _attention(config: ModelConfig, weights: Weights, prefix: str) -> Attention:
    query_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    qkv = {f"{prefix}.q_proj": query_rows, f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}
    out = {f"{prefix}.o_proj": config.hidden_size}
    return Attention(
        _linear(weights, qkv, config.hidden_size, bias=config.attention_bias),
        _linear(weights, out, query_rows, bias=config.attention_bias),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )


def _mlp(config: ModelConfig, weights: Weights, prefix: str) -> GatedMLP:
    inner = config.intermediate_size
    gate_up = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
    down = {f"{prefix}.down_proj": config.hidden_size}
    return GatedMLP(
        _linear(weights, gate_up, config.hidden_size, bias=config.mlp_bias),
        _linear(weights, down, inner, bias=config.mlp_bias),
        config.hidden_act,
    )


def _linear(weights: Weights, rows: dict[str, int], columns: int, *, bias: bool) -> Linear:
    """One or several projections of the same input as one."""
    weight = weights.stacked({f"{name}.weight": count for name, count in rows.items()}, columns)
    if not bias:
        return Linear(weight)
    return Linear(weight, weights.stacked({f"{name}.bias": n for name, n in rows.items()}))


def _norm(config: ModelConfig, weights: Weights, name: str) -> RMSNorm:
    return RMSNorm(weights.tensor(f"{name}.weight", config.hidden_size), config.rms_norm_eps)


def _final_norm(config: ModelConfig, weights: Weights) -> RMSNorm:
    return _norm(config, weights, "model.norm")


def _head(config: ModelConfig, weights: Weights, embedding: Tensor) -> Linear:
    if config.tie_word_embeddings:
        return Linear(embedding)
    return _linear(weights, {"lm_head": config.vocab_size}, config.hidden_size, bias=False)


FAMILY = Family(embedding=_embedding, layer=_layer, final_norm=_final_norm, head=_head)
