"""What works on each token by itself."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from splitserve import native
from splitserve.core.errors import invalid
from splitserve.model.layers import Projection


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """A key of `ACTIVATIONS`; any other raises `InvalidArgumentError`."""
    if name not in ACTIVATIONS:
        raise invalid("hidden_act", name, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


class GatedMLP:
    """``down(activation(gate(x)) * up(x))`` (SwiGLU, Shazeer, 2020).

    Args:
        gate_up: Both projections as one, the gate first.
        down: The projection back.
        activation: A key of `ACTIVATIONS`.

    Raises:
        InvalidArgumentError: The activation is unknown.
    """

    def __init__(self, gate_up: Projection, down: Projection, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation_of(activation)
        self._fused = activation == "silu"

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, E]`` to ``[T, E]``, added to ``residual`` if there is one."""
        both = self._gate_up(x)
        if self._fused and native.computes(x.dtype):
            return self._down(native.ops.silu_gate(both), residual)
        gate, up = both.chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up), residual)


class PlainMLP:
    """``down(activation(up(x)))``.

    Args:
        up: The projection to the inner width.
        down: The projection back.
        activation: A key of `ACTIVATIONS`.

    Raises:
        InvalidArgumentError: The activation is unknown.
    """

    def __init__(self, up: Projection, down: Projection, activation: str) -> None:
        self._up = up
        self._down = down
        self._activation = activation_of(activation)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[T, E]`` to ``[T, E]``, added to ``residual`` if there is one."""
        return self._down(self._activation(self._up(x)), residual)
