"""Mixtures of experts: of many MLPs, each token takes a few."""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitserve.model.builder import Builder
from splitserve.model.group import TensorGroup
from splitserve.model.layers import Linear, Projection
from splitserve.model.mlp import GatedMLP


class RoutedExperts:
    """The weighted sum of each token's most likely experts (Shazeer et al., 2017).

    Every rank has a part of every expert, so a token's experts cost all ranks the same.

    Args:
        router: To a score for each expert.
        experts: This rank's part of each.
        top_k: How many a token takes.
        normalise: Whether their weights add up to one.
        group: The ranks.
    """

    def __init__(
        self,
        router: Projection,
        experts: Sequence[GatedMLP],
        top_k: int,
        *,
        normalise: bool,
        group: TensorGroup,
    ) -> None:
        self._router = router
        self._experts = tuple(experts)
        self._top_k = top_k
        self._normalise = normalise
        self._group = group

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, E]`` to ``[T, E]``, added to ``residual`` if there is one."""
        scores = torch.softmax(self._router(x).float(), -1)
        weights, chosen = torch.topk(scores, self._top_k, sorted=False)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        first = residual is not None and self._group.rank == 0
        out = residual.clone() if residual is not None and first else torch.zeros_like(x)
        for number, expert in enumerate(self._experts):
            tokens, place = torch.where(chosen == number)
            if tokens.numel():
                weight = weights[tokens, place].unsqueeze(-1).to(x.dtype)
                out.index_add_(0, tokens, expert(x.index_select(0, tokens)).mul_(weight))
        return self._group.sum_(out)


def routed_experts(
    build: Builder,
    prefix: str,
    names: tuple[str, str, str],
    *,
    inner: int,
    count: int,
    top_k: int,
    normalise: bool,
) -> RoutedExperts:
    """Builds a layer's experts.

    Args:
        build: The builder.
        prefix: Where they are: ``gate`` and ``experts.0`` … lie below.
        names: An expert's gate, up and down projections.
        inner: An expert's inner width.
        count: How many there are.
        top_k: How many a token takes.
        normalise: Whether their weights add up to one.
    """
    hidden, cut = build.config.hidden_size, build.part.share(inner)
    experts = []
    for number in range(count):
        gate, up, down = (f"{prefix}.experts.{number}.{name}" for name in names)
        experts.append(
            GatedMLP(
                build.split_linear([(gate, cut), (up, cut)], hidden, bias=False),
                build.partial_linear(down, hidden, cut),
                build.config.hidden_act,
            )
        )
    # Never of 8 bits: it is small, and a token that takes another expert is another token.
    router = Linear(build.tensor(f"{prefix}.gate.weight", count, hidden))
    return RoutedExperts(router, experts, top_k, normalise=normalise, group=build.group)
