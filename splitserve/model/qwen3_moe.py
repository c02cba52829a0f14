"""Qwen3-MoE (Yang et al., 2025): Qwen3 with routed experts in most layers."""

from splitserve.model import llama, qwen3
from splitserve.model.builder import Builder
from splitserve.model.decoder import TokenMLP
from splitserve.model.experts import routed_experts


def _mlp(build: Builder, index: int) -> TokenMLP:
    raw = build.config.raw
    every = int(raw.get("decoder_sparse_step", 1))
    # transformers writes the number of experts under either name.
    count = int(raw.get("num_experts") or raw["num_local_experts"])
    if index in raw.get("mlp_only_layers", ()) or not count or (index + 1) % every:
        return llama.mlp(build, index)
    return routed_experts(
        build,
        f"model.layers.{index}.mlp",
        ("gate_proj", "up_proj", "down_proj"),
        inner=int(raw["moe_intermediate_size"]),
        count=count,
        top_k=int(raw["num_experts_per_tok"]),
        normalise=bool(raw.get("norm_topk_prob", False)),
    )


FAMILY = llama.family(attention=qwen3.attention, mlp=_mlp)
