"""Phi-3 (Abdin et al., 2024): Llama with fused projections, and parts of heads left unrotated."""

from splitserve.model import llama
from splitserve.model.attention import Attention
from splitserve.model.builder import Builder
from splitserve.model.mlp import GatedMLP
from splitserve.model.registry import Family


def _attention(build: Builder, index: int) -> Attention:
    config, part = build.config, build.part
    queries, kv = part.heads.times(config.head_dim), part.kv_heads.times(config.head_dim)
    total = queries.total + 2 * kv.total
    name = f"model.layers.{index}.self_attn.qkv_proj"
    rows = [
        (name, queries.within(total, 0)),
        (name, kv.within(total, queries.total)),
        (name, kv.within(total, queries.total + kv.total)),
    ]
    return llama.attention(build, index, rows=rows)


def _mlp(build: Builder, index: int) -> GatedMLP:
    config = build.config
    prefix = f"model.layers.{index}.mlp"
    inner = build.part.share(config.intermediate_size)
    rows = [
        (f"{prefix}.gate_up_proj", inner.within(2 * inner.total, offset))
        for offset in (0, inner.total)
    ]
    return GatedMLP(
        build.split_linear(rows, config.hidden_size, bias=False),
        build.summed_linear(f"{prefix}.down_proj", config.hidden_size, inner, bias=False),
        config.hidden_act,
    )


FAMILY: Family = llama.family(attention=_attention, mlp=_mlp)
