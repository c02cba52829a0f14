"""Builds a model's modules from its weights, each rank its part of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitserve.model.config import ModelConfig, RopeConfig
from splitserve.model.group import TensorGroup
from splitserve.model.int8 import Int8Linear, channel_scales
from splitserve.model.layers import (
    Embedding,
    Head,
    LayerNorm,
    Linear,
    Projection,
    RMSNorm,
    SummedLinear,
)
from splitserve.model.part import Cut, ModelPart
from splitserve.model.rope import Rope
from splitserve.model.weights import Weights

Rows = tuple[str, Cut]
"""Some rows of a projection: its name, without ``.weight``, and which."""


class Builder:
    """What a family builds its modules with.

    A layer's first projection is split by its outputs and its second by its inputs (Shoeybi et
    al., 2019): between the two, a rank needs nothing from the others.

    Args:
        config: The model.
        part: What this rank holds.
        group: The ranks it shares layers with.
        weights: The whole model's.
        dtype: Data type to compute in.
        quantization: How linear layers keep their weights: ``none`` or ``int8``.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: ModelPart,
        group: TensorGroup,
        weights: Weights,
        dtype: torch.dtype,
        quantization: str = "none",
    ) -> None:
        self.config = config
        self.part = part
        self.group = group
        self.weights = weights
        self.dtype = dtype
        self._int8 = quantization == "int8"
        self._ropes: dict[RopeConfig, Rope] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One whole tensor."""
        out = torch.empty(shape, dtype=self.dtype)
        self.weights.read_into(out, name, *map(Cut.whole, shape))
        return out

    def split_linear(
        self, rows: Sequence[Rows], columns: int, *, bias: bool, transposed: bool = False
    ) -> Projection:
        """Some outputs of one or several projections of the same input, as one.

        Args:
            rows: Which outputs of which projections, in order.
            columns: Inputs.
            bias: Whether they have biases.
            transposed: Whether the weights are stored ``[in, out]``.
        """
        added = self._stacked_bias(rows) if bias else None
        return self._linear(rows, Cut.whole(columns), added, transposed=transposed)

    def summed_linear(
        self, name: str, rows: int, columns: Cut, *, bias: bool, transposed: bool = False
    ) -> SummedLinear:
        """A projection of some of the inputs; what the ranks make of theirs is added up.

        Args:
            name: The projection.
            rows: Outputs.
            columns: Which inputs are this rank's.
            bias: Whether it has a bias.
            transposed: Whether the weights are stored ``[in, out]``.
        """
        whole = [(name, Cut.whole(rows))]
        # Added once, not once per rank.
        added = self._stacked_bias(whole) if bias and self.group.rank == 0 else None
        linear = self._linear(whole, columns, added, transposed=transposed)
        return SummedLinear(linear, self.group)

    def partial_linear(self, name: str, rows: int, columns: Cut) -> Projection:
        """Like `summed_linear`, without a bias, for who adds the ranks' results up himself."""
        return self._linear([(name, Cut.whole(rows))], columns)

    def rms_norm(self, name: str, width: int | None = None) -> RMSNorm:
        """A norm of hidden states, or of what has another width."""
        weight = self.tensor(f"{name}.weight", width or self.config.hidden_size)
        return RMSNorm(weight, self.config.norm_eps)

    def layer_norm(self, name: str, eps: float | None = None) -> LayerNorm:
        """A norm of hidden states with a bias."""
        width = self.config.hidden_size
        return LayerNorm(
            self.tensor(f"{name}.weight", width),
            self.tensor(f"{name}.bias", width),
            self.config.norm_eps if eps is None else eps,
        )

    def rope(self, layer: int) -> Rope:
        """How a layer rotates; layers that rotate alike have the same one."""
        config = self.config.rope(layer)
        if config not in self._ropes:
            self._ropes[config] = Rope(config, self.config.head_dim, self.dtype)
        return self._ropes[config]

    def embedding(
        self, name: str, *, positions: Tensor | None = None, scale: float = 1.0
    ) -> Embedding:
        """The table of token embeddings, each rank some of the vocabulary; see `Embedding`."""
        cut = self.part.share(self.config.vocab_size)
        table = self._stacked([(name, cut)], Cut.whole(self.config.hidden_size), self.dtype)
        return Embedding(table, cut, self.group, positions, scale)

    def head(self, name: str, *, softcap: float | None = None) -> Head:
        """From hidden states to logits, each rank some of the vocabulary.

        Args:
            name: The projection; for a tied one, the embedding's.
            softcap: See `Head`.
        """
        vocab = self.config.vocab_size
        rows = [(name, self.part.share(vocab))]
        linear = self.split_linear(rows, self.config.hidden_size, bias=False)
        return Head(linear, vocab, self.group, softcap)

    def _linear(
        self,
        rows: Sequence[Rows],
        columns: Cut,
        bias: Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> Projection:
        if not self._int8:
            return Linear(self._stacked(rows, columns, self.dtype, transposed=transposed), bias)
        # Whole rows, for their scales; and in float32, so that every data type has the same.
        whole = self._stacked(rows, Cut.whole(columns.total), torch.float32, transposed=transposed)
        scales = channel_scales(whole)
        return Int8Linear(whole[:, columns.begin : columns.end], scales, self.dtype, bias)

    def _stacked(
        self, rows: Sequence[Rows], columns: Cut, dtype: torch.dtype, *, transposed: bool = False
    ) -> Tensor:
        counts = [cut.size for _, cut in rows]
        out = torch.empty(sum(counts), columns.size, dtype=dtype)
        for (name, cut), part in zip(rows, torch.split(out, counts), strict=True):
            if transposed:
                self.weights.read_into(part.t(), f"{name}.weight", columns, cut)
            else:
                self.weights.read_into(part, f"{name}.weight", cut, columns)
        return out

    def _stacked_bias(self, rows: Sequence[Rows]) -> Tensor:
        counts = [cut.size for _, cut in rows]
        out = torch.empty(sum(counts), dtype=self.dtype)
        for (name, cut), part in zip(rows, torch.split(out, counts), strict=True):
            self.weights.read_into(part, f"{name}.bias", cut)
        return out
