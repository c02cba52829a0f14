"""What the hardware allows: how fast a case can be at most, whoever computes it."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

from safetensors import safe_open

from bench.engines.case import NEW_TOKENS, Case, Prefill
from bench.machine import matmul_rate, read_bandwidth
from splitserve.kv.layout import DTYPE_BYTES
from splitserve.model.config import SLIDING, ModelConfig

TABLES = ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe")
"""A step reads few rows of them, unless one is also the head."""

HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True, slots=True)
class Hardware:
    """Measured here, with the threads that both sides have.

    Attributes:
        bandwidth: Bytes a second that are read from memory.
        matmul: Floating-point operations a second of a matrix product in the sides' dtype.
    """

    bandwidth: float
    matmul: float

    @classmethod
    def measure(cls, dtype: str, threads: int) -> Self:
        """What it does right now."""
        return cls(read_bandwidth(threads), matmul_rate(dtype, threads))

    def best(self, other: "Hardware") -> "Hardware":
        """The better of two measurements: whoever disturbed one made it look slower than it is."""
        return Hardware(
            max(self.bandwidth, other.bandwidth),
            max(self.matmul, other.matmul),
        )

    def __str__(self) -> str:
        return (
            f"memory reads {self.bandwidth / 1e9:.1f} GB/s, "
            f"matrix products {self.matmul / 1e9:,.0f} GFLOP/s"
        )


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model costs at the least.

    Attributes:
        config: The model's.
        weight_bytes: Size of an element of weights.
        kv_bytes: Of KV.
        body: Parameters every token is multiplied with.
        head: Parameters of the head, which only tokens that are sampled are multiplied with.
    """

    config: ModelConfig
    weight_bytes: int
    kv_bytes: int
    body: float
    head: int

    @classmethod
    def of(cls, model: Path, config: ModelConfig, dtype: str, quantization: str = "none") -> Self:
        """Counts the parameters in a model's directory; the few that are not rounded too."""
        body = 0.0
        for file in model.glob("*.safetensors"):
            with safe_open(file, framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118  (no mapping)
                    if not {*TABLES, *HEADS} & set(name.split(".")):
                        shape = weights.get_slice(name).get_shape()
                        body += prod(shape) * _used_share(name, config)
        size = DTYPE_BYTES[dtype]
        weight_size = 1 if quantization == "int8" else size
        return cls(config, weight_size, size, body, config.vocab_size * config.hidden_size)

    def rate(self, case: Case, hardware: Hardware) -> float:
        """Tokens a second at most.

        A prompt is bound by arithmetic: two operations for each parameter and token, and attention.
        Decode is bound by memory: a step reads the weights and the KV of all its sequences.
        """
        if isinstance(case, Prefill):
            return case.tokens * hardware.matmul / self._prefill_operations(case.tokens)
        # In the mean of the steps; the first reads the first new token's KV too.
        length = case.context + (NEW_TOKENS + 1) // 2
        return case.batch * hardware.bandwidth / self._step_bytes(case.batch, length)

    def _prefill_operations(self, tokens: int) -> float:
        pairs = sum(_pairs(tokens, window) for window in self._windows(tokens))
        # Scores and their sum over values: a product and a sum each.
        attention = 4 * self.config.num_heads * self.config.head_dim * pairs
        return 2 * (self.body * tokens + self.head) + attention

    def _step_bytes(self, batch: int, length: int) -> float:
        seen = sum(self._windows(length))
        kv = 2 * seen * self.config.num_kv_heads * self.config.head_dim
        return (self.body + self.head) * self.weight_bytes + batch * kv * self.kv_bytes

    def _windows(self, length: int) -> list[int]:
        """How many tokens the last of so many sees in each layer."""
        window = self.config.sliding_window or length
        return [
            min(length, window) if kind == SLIDING else length for kind in self.config.layer_kinds
        ]


def _pairs(tokens: int, window: int) -> int:
    """How often a token of a prompt sees one, itself included."""
    return window * (window + 1) // 2 + (tokens - window) * window


def _used_share(name: str, config: ModelConfig) -> float:
    """How much of a tensor a token is multiplied with, at the least."""
    if ".experts." not in name:
        return 1.0
    raw = config.raw
    return float(raw["num_experts_per_tok"] / (raw.get("num_experts") or raw["num_local_experts"]))
