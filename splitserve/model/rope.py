"""Rotary position embedding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.model.config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """How far each of a step's tokens is rotated; made once per step.

    Attributes:
        cos: ``[T, 1, R]``, where R is how much of a head is rotated.
        sin: ``[T, 1, R]``, the first half negated.
    """

    cos: Tensor
    sin: Tensor

    @property
    def width(self) -> int:
        """R."""
        return self.cos.shape[-1]

    def apply_(self, heads: Tensor) -> None:
        """Rotates the first R of ``[T, heads, D]`` in place; the two halves are the pairs."""
        rotated = heads[..., : self.width]
        swapped = rotated.roll(self.width // 2, -1)
        rotated.mul_(self.cos).addcmul_(swapped, self.sin)


class Rope:
    """Rotary position embedding.

    Args:
        config: Base and stretching.
        head_dim: D.
        dtype: Data type of the rotated heads.
    """

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        self._frequencies = rope_frequencies(config, int(head_dim * config.share))
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


def rope_frequencies(config: RopeConfig, width: int) -> Tensor:
    """Radians per position of each pair of what is rotated: ``[R / 2]``."""
    pairs = torch.arange(0, width, 2, dtype=torch.int64).float()
    plain = 1.0 / (config.theta ** (pairs / width))
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(plain, config)
    if config.kind == "yarn":
        return _yarn_frequencies(plain, config, width)
    return plain


def _llama3_frequencies(plain: Tensor, config: RopeConfig) -> Tensor:
    """Keeps short waves, stretches long ones, and goes smoothly from one to the other."""
    rotations = config.original_length * plain / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / config.factor


def _yarn_frequencies(plain: Tensor, config: RopeConfig, width: int) -> Tensor:
    """Keeps dimensions with many rotations, stretches those with few (Peng et al., 2023, §3.2)."""

    def dimension_of(rotations: float) -> float:
        ratio = config.original_length / (rotations * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = torch.arange(width // 2).float()
    stretched = ((ramp - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return stretched * plain / config.factor + (1.0 - stretched) * plain
