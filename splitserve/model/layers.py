"""Linear layers and norms, and what is at both ends of a decoder."""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from splitserve import native
from splitserve.model.group import TensorGroup
from splitserve.model.pages import in_large_pages
from splitserve.model.part import Cut


class Projection(Protocol):
    """A matrix product, however its weights are kept."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, in]`` to ``[T, out]``, added to ``residual`` ``[T, out]`` if there is one."""


class Linear:
    """A matrix product with an optional bias.

    Weights are packed once, for whoever computes: our kernels, oneDNN otherwise where it can
    compute in their data type, else torch takes them as they are.

    Args:
        weight: ``[out, in]``; may be dropped by the caller afterwards.
        bias: ``[out]``, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._out = weight.shape[0]
        self._bias = bias
        self._native = native.multiplies(weight.dtype, weight.shape[1])
        self._packed = not self._native and _packs(weight.dtype)
        if self._native:
            self._weight = in_large_pages(native.ops.pack_linear(weight))
        elif self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        else:
            self._weight = weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, in]`` to ``[T, out]``, added to ``residual`` ``[T, out]`` if there is one."""
        if self._native:
            out: Tensor = native.ops.linear(x, self._weight, self._out, self._bias, residual)
            return out
        if self._packed:
            out = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            out = functional.linear(x, self._weight, self._bias)
        return out if residual is None else out.add_(residual)


def _packs(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class SummedLinear:
    """A projection whose inputs tensor ranks share out: the sum of what they make of theirs.

    Args:
        linear: Of this rank's inputs; the bias on the first rank only.
        group: The ranks.
    """

    def __init__(self, linear: Projection, group: TensorGroup) -> None:
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Its share of ``[T, in]`` to ``[T, out]``, added to ``residual`` if there is one."""
        return self._group.sum_(self._linear(x, residual if self._group.rank == 0 else None))


class Embedding:
    """The table of token embeddings, of whose rows tensor ranks share out the vocabulary.

    Args:
        table: This rank's rows: ``[V / ranks, E]``.
        cut: Which ones.
        group: The ranks.
        positions: Learned position embeddings, added: ``[positions, E]``; None for none.
        scale: What token embeddings are multiplied by.
    """

    def __init__(
        self,
        table: Tensor,
        cut: Cut,
        group: TensorGroup,
        positions: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        self._table = table
        self._cut = cut
        self._group = group
        self._positions = positions
        self._scale = scale

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """``[T]`` and ``[T]`` to ``[T, E]``."""
        hidden = self._look_up(token_ids)
        if self._scale != 1.0:
            # Rounded to the data type first, as the models were trained.
            hidden *= torch.tensor(self._scale, dtype=hidden.dtype)
        if self._positions is not None:
            hidden += self._positions.index_select(0, positions)
        return hidden

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._table.index_select(0, token_ids)
        rows = token_ids - self._cut.begin
        elsewhere = (rows < 0) | (rows >= self._cut.size)
        found = self._table.index_select(0, rows.masked_fill(elsewhere, 0))
        return self._group.sum_(found.masked_fill_(elsewhere.unsqueeze(-1), 0))


class Head:
    """Hidden states to logits.

    Args:
        linear: To this rank's share of the vocabulary.
        vocab_size: V.
        group: The ranks that share it.
        softcap: Logits stay between this and its negative; None lets them.
    """

    def __init__(
        self, linear: Projection, vocab_size: int, group: TensorGroup, softcap: float | None = None
    ) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._group = group
        self._softcap = softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[T, E]`` to float32 ``[T, V]`` on the first rank, to ``[0, V]`` on the others."""
        if hidden.shape[0]:
            logits = self._group.join(self._linear(hidden), self._vocab_size)
            if logits is not None:
                return softcapped(logits.float(), self._softcap)
        return torch.empty(0, self._vocab_size)


def softcapped(scores: Tensor, cap: float | None) -> Tensor:
    """Presses scores between ``-cap`` and ``cap``, small ones left almost as they are."""
    return scores if cap is None else torch.tanh(scores / cap) * cap


class RMSNorm:
    """Root mean square norm (Zhang & Sennrich, 2019).

    Args:
        weight: ``[E]``.
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        # x / sqrt(mean(x²) + eps) is x / hypot(|x|, sqrt(E eps)) * sqrt(E): four small operators,
        # half the time of torch's rms_norm for a few rows.
        self._weight = weight.float()
        self._eps = eps
        width = weight.numel()
        self._scale = self._weight * math.sqrt(width)
        self._floor = torch.tensor([math.sqrt(width * eps)])

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., E]`` to ``[..., E]``; computes in float32 whatever the data type."""
        if native.computes(x.dtype) and x.dim() == 2:
            out: Tensor = native.ops.rms_norm(x, self._weight, self._eps)
            return out
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / length.hypot_(self._floor)).mul_(self._scale).to(x.dtype)


class LayerNorm:
    """Norm to mean 0 and variance 1 (Ba et al., 2016).

    Args:
        weight: ``[E]``.
        bias: ``[E]``.
        eps: Added to the variance.
    """

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, E]`` to ``[T, E]``."""
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


Norm = RMSNorm | LayerNorm
