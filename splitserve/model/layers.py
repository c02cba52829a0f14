"""The parts of a decoder that know nothing of KV: linear, norm, MLP, rotary positions, ends."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from splitserve import native
from splitserve.core.errors import invalid
from splitserve.model.config import RopeConfig
from splitserve.model.group import TensorGroup
from splitserve.model.part import Cut

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class Linear:
    """A matrix product with an optional bias.

    Weights are packed once, for whoever computes: our kernel in float32, oneDNN otherwise where it
    can compute in their data type, else torch takes them as they are.

    Args:
        weight: ``[out, in]``; may be dropped by the caller afterwards.
        bias: ``[out]``, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._out = weight.shape[0]
        self._bias = bias
        self._native = native.computes(weight.dtype)
        self._packed = not self._native and _packs(weight.dtype)
        if self._native:
            self._weight = native.ops.pack_linear(weight)
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

    def __init__(self, linear: Linear, group: TensorGroup) -> None:
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """This rank's share of ``[T, in]`` to ``[T, out]``, added to ``residual``."""
        return self._group.sum_(self._linear(x, residual if self._group.rank == 0 else None))


class Embedding:
    """The table of token embeddings, of whose rows tensor ranks share out the vocabulary.

    Args:
        table: This rank's rows: ``[V / ranks, E]``.
        cut: Which ones.
        group: The ranks.
    """

    def __init__(self, table: Tensor, cut: Cut, group: TensorGroup) -> None:
        self._table = table
        self._cut = cut
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """``[T]`` to ``[T, E]``."""
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
    """

    def __init__(self, linear: Linear, vocab_size: int, group: TensorGroup) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[T, E]`` to float32 ``[T, V]`` on the first rank, to ``[0, V]`` on the others."""
        if hidden.shape[0]:
            logits = self._group.join(self._linear(hidden), self._vocab_size)
            if logits is not None:
                return logits.float()
        return torch.empty(0, self._vocab_size)


class RMSNorm:
    """Root mean square norm (Zhang & Sennrich, 2019).

    Args:
        weight: ``[E]``.
        eps: Added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        # x / sqrt(mean(x²) + eps) is x / hypot(|x|, sqrt(E eps)) * sqrt(E): four small operators,
        # half the time of torch's rms_norm for a few rows.
        self._native = native.computes(weight.dtype)
        self._weight = weight
        self._eps = eps
        width = weight.numel()
        self._scale = weight.float() * math.sqrt(width)
        self._floor = torch.tensor([math.sqrt(width * eps)])

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, E]`` to ``[T, E]``; computes in float32 whatever the data type."""
        if self._native:
            out: Tensor = native.ops.rms_norm(x, self._weight, self._eps)
            return out
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / length.hypot_(self._floor)).mul_(self._scale).to(x.dtype)


class GatedMLP:
    """``down(activation(gate(x)) * up(x))`` (SwiGLU, Shazeer, 2020).

    Args:
        gate_up: Both projections as one, the gate first.
        down: The projection back.
        activation: A key of `ACTIVATIONS`.

    Raises:
        InvalidArgumentError: The activation is unknown.
    """

    def __init__(self, gate_up: Linear, down: SummedLinear, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise invalid("hidden_act", activation, ", ".join(ACTIVATIONS))
        self._gate_up = gate_up
        self._down = down
        self._activation = ACTIVATIONS[activation]
        self._fused = activation == "silu"

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """``[T, E]`` to ``[T, E]``, added to ``residual``."""
        both = self._gate_up(x)
        if self._fused and native.computes(x.dtype):
            return self._down(native.ops.silu_gate(both), residual)
        gate, up = both.chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up), residual)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How far each of a step's tokens is rotated; made once per step.

    Attributes:
        cos: ``[T, 1, D]``.
        sin: ``[T, 1, D]``, the first half negated.
    """

    cos: Tensor
    sin: Tensor

    def apply_(self, heads: Tensor) -> None:
        """Rotates ``[T, heads, D]`` in place; the two halves of a head are its pairs."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(self.cos).addcmul_(swapped, self.sin)


class Rope:
    """Rotary position embedding.

    Args:
        config: Base and stretching.
        head_dim: D.
        dtype: Data type of the rotated heads.
    """

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        self._frequencies = rope_frequencies(config, head_dim)
        self._gain = config.attention_factor
        self._dtype = dtype

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at these positions ``[T]``."""
        angles = torch.outer(positions.float(), self._frequencies)
        cos, sin = angles.cos() * self._gain, angles.sin() * self._gain
        return Rotation(
            torch.cat((cos, cos), -1).unsqueeze(1).to(self._dtype),
            torch.cat((-sin, sin), -1).unsqueeze(1).to(self._dtype),
        )


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of a head: ``[D / 2]``."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
    plain = 1.0 / (config.theta ** (pairs / head_dim))
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(plain, config)
    if config.kind == "yarn":
        return _yarn_frequencies(plain, config, head_dim)
    return plain


def _llama3_frequencies(plain: Tensor, config: RopeConfig) -> Tensor:
    """Keeps short waves, stretches long ones, and goes smoothly from one to the other."""
    rotations = config.original_length * plain / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / config.factor


def _yarn_frequencies(plain: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Keeps dimensions with many rotations, stretches those with few (Peng et al., 2023, §3.2)."""

    def dimension_of(rotations: float) -> float:
        ratio = config.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(head_dim // 2).float()
    stretched = ((ramp - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return stretched * plain / config.factor + (1.0 - stretched) * plain
