"""Mixtral (Jiang et al., 2024): Mistral with routed experts."""

from splitserve.model import llama
from splitserve.model.builder import Builder
from splitserve.model.experts import RoutedExperts, routed_experts


def _mlp(build: Builder, index: int) -> RoutedExperts:
    raw = build.config.raw
    return routed_experts(
        build,
        f"model.layers.{index}.block_sparse_moe",
        ("w1", "w3", "w2"),
        inner=build.config.intermediate_size,
        count=int(raw["num_local_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        normalise=True,
    )


FAMILY = llama.family(mlp=_mlp)
