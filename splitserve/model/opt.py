"""OPT (Zhang et al., 2022): learned positions, layer norms, plain MLP, biases everywhere."""

from splitserve.model.attention import Attention
from splitserve.model.builder import Builder
from splitserve.model.decoder import DecoderLayer
from splitserve.model.layers import Embedding, Head, Norm
from splitserve.model.mlp import PlainMLP
from splitserve.model.registry import Family

_EMBEDDING = "model.decoder.embed_tokens"

_FIRST_POSITION = 2
"""The table's first rows are no positions, a habit of the code that trained it."""

_EPS = 1e-5
"""Its configs leave it out."""


def _embedding(build: Builder) -> Embedding:
    config = build.config
    # The 350M variant has embeddings of another width, and norms behind instead of before.
    config.require("word_embed_proj_dim", config.hidden_size)
    config.require("do_layer_norm_before", True)
    config.require("_remove_final_layer_norm", False)
    config.require("enable_bias", True)
    config.require("layer_norm_elementwise_affine", True)
    rows = config.max_position_embeddings + _FIRST_POSITION
    table = build.tensor("model.decoder.embed_positions.weight", rows, config.hidden_size)
    return build.embedding(_EMBEDDING, positions=table[_FIRST_POSITION:])


def _layer(build: Builder, index: int) -> DecoderLayer:
    prefix = f"model.decoder.layers.{index}"
    return DecoderLayer(
        attention_norm=build.layer_norm(f"{prefix}.self_attn_layer_norm", _EPS),
        attention=_attention(build, f"{prefix}.self_attn"),
        mlp_norm=build.layer_norm(f"{prefix}.final_layer_norm", _EPS),
        mlp=_mlp(build, prefix),
    )


def _attention(build: Builder, prefix: str) -> Attention:
    config, heads = build.config, build.part.heads
    cut = heads.times(config.head_dim)
    rows = [(f"{prefix}.{name}", cut) for name in ("q_proj", "k_proj", "v_proj")]
    return Attention(
        build.split_linear(rows, config.hidden_size, bias=True),
        build.summed_linear(f"{prefix}.out_proj", config.hidden_size, cut, bias=True),
        heads.size,
        heads.size,
        config.head_dim,
        rope=None,
    )


def _mlp(build: Builder, prefix: str) -> PlainMLP:
    config = build.config
    inner = build.part.share(config.intermediate_size)
    return PlainMLP(
        build.split_linear([(f"{prefix}.fc1", inner)], config.hidden_size, bias=True),
        build.summed_linear(f"{prefix}.fc2", config.hidden_size, inner, bias=True),
        config.hidden_act,
    )


def _final_norm(build: Builder) -> Norm:
    return build.layer_norm("model.decoder.final_layer_norm", _EPS)


def _head(build: Builder) -> Head:
    return build.head(_EMBEDDING if build.config.tie_word_embeddings else "lm_head")


FAMILY = Family(embedding=_embedding, layer=_layer, final_norm=_final_norm, head=_head)
