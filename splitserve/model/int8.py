"""Linear layers of 8-bit weights: half the bytes of bfloat16 to keep, and for a step to read."""

import torch
from torch import Tensor
from torch.nn import functional

from splitserve import native
from splitserve.model.pages import in_large_pages

LARGEST = 127
"""-128 is left out: what is symmetric needs no zero point."""

_WIDENED_AT_ONCE = 1 << 20
"""Weights that plain torch widens at a time, so that they are still in a cache when multiplied."""


def channel_scales(weight: Tensor) -> Tensor:
    """What one step of an 8-bit number is worth, for each output: ``[out, in]`` to ``[out]``.

    The whole row has to be there, also where tensor ranks share out its inputs: all layouts of a
    model have to have the same weights, since one of them continues what another has begun.
    """
    largest = torch.maximum(weight.amax(1), -weight.amin(1))
    return (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)


class Int8Linear:
    """A matrix product, each output's weights rounded to 8 bits and a scale (Jacob et al., 2018).

    Only weights are rounded: activations keep their data type, and sums are float32.

    Args:
        weight: float32 ``[out, in]``; left with other numbers in it.
        scales: Of its whole rows, float32 ``[out]``; see `channel_scales`.
        dtype: Data type of inputs and outputs.
        bias: ``[out]``, or None.
    """

    def __init__(
        self, weight: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        values = weight.div_(scales.unsqueeze(1)).round_().to(torch.int8)
        self._out, inputs = weight.shape
        # Any data type without a kernel of its own is computed in float32.
        self._dtype = dtype if native.multiplies(dtype, inputs) else torch.float32
        self._bias = None if bias is None else bias.to(self._dtype)
        self._native = native.multiplies(self._dtype, inputs)
        if self._native:
            self._weight = in_large_pages(native.ops.pack_linear(values))
            panels, _, columns = self._weight.shape
            scales = functional.pad(scales, (0, panels * columns // 2 - self._out))
        else:
            self._weight = values
        self._scales = scales

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, in]`` to ``[T, out]``, added to ``residual`` ``[T, out]`` if there is one."""
        wide = x.to(self._dtype)
        added = None if residual is None else residual.to(self._dtype)
        if self._native:
            out: Tensor = native.ops.linear(
                wide, self._weight, self._out, self._bias, added, self._scales
            )
            return out.to(x.dtype)
        rows = max(1, _WIDENED_AT_ONCE // self._weight.shape[1])
        parts = [functional.linear(wide, part.float()) for part in torch.split(self._weight, rows)]
        out = torch.cat(parts, 1).mul_(self._scales)
        for more in (self._bias, added):
            if more is not None:
                out += more
        return out.to(x.dtype)
