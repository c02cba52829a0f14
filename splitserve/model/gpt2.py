"""GPT-2 (Radford et al., 2019): learned positions, layer norms, plain MLP, turned weights."""

from splitserve.model.attention import Attention
from splitserve.model.builder import Builder
from splitserve.model.decoder import DecoderLayer
from splitserve.model.layers import Embedding, Head, Norm
from splitserve.model.mlp import PlainMLP
from splitserve.model.registry import Family

_EMBEDDING = "transformer.wte"


def _embedding(build: Builder) -> Embedding:
    config = build.config
    positions = build.tensor(
        "transformer.wpe.weight", config.max_position_embeddings, config.hidden_size
    )
    return build.embedding(_EMBEDDING, positions=positions)


def _layer(build: Builder, index: int) -> DecoderLayer:
    build.config.require("scale_attn_weights", True)
    build.config.require("scale_attn_by_inverse_layer_idx", False)
    prefix = f"transformer.h.{index}"
    return DecoderLayer(
        attention_norm=build.layer_norm(f"{prefix}.ln_1"),
        attention=_attention(build, f"{prefix}.attn"),
        mlp_norm=build.layer_norm(f"{prefix}.ln_2"),
        mlp=_mlp(build, f"{prefix}.mlp"),
    )


def _attention(build: Builder, prefix: str) -> Attention:
    config, heads = build.config, build.part.heads
    width, cut = config.hidden_size, heads.times(config.head_dim)
    rows = [(f"{prefix}.c_attn", cut.within(3 * width, part * width)) for part in range(3)]
    return Attention(
        build.split_linear(rows, width, bias=True, transposed=True),
        build.summed_linear(f"{prefix}.c_proj", width, cut, bias=True, transposed=True),
        heads.size,
        heads.size,
        config.head_dim,
        rope=None,
    )


def _mlp(build: Builder, prefix: str) -> PlainMLP:
    config = build.config
    inner = build.part.share(config.intermediate_size)
    rows = [(f"{prefix}.c_fc", inner)]
    return PlainMLP(
        build.split_linear(rows, config.hidden_size, bias=True, transposed=True),
        build.summed_linear(
            f"{prefix}.c_proj", config.hidden_size, inner, bias=True, transposed=True
        ),
        config.hidden_act,
    )


def _final_norm(build: Builder) -> Norm:
    return build.layer_norm("transformer.ln_f")


def _head(build: Builder) -> Head:
    return build.head(_EMBEDDING if build.config.tie_word_embeddings else "lm_head")


FAMILY = Family(embedding=_embedding, layer=_layer, final_norm=_final_norm, head=_head)
