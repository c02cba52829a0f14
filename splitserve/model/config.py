"""What a model is, from its directory in the Hugging Face format. Imports no torch."""

import json
import math
import platform
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from splitserve.core.errors import InvalidArgumentError, NotFoundError, invalid
from splitserve.model.registry import check_architecture

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"

FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")
"""Attention to everything before, and to the last tokens only; the words of ``config.json``."""

ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and how it is stretched to longer contexts.

    Attributes:
        theta: Base of the frequencies.
        kind: One of `ROPE_KINDS`. ``dynamic`` only differs from ``default`` beyond the length the
            model was trained for, where we do not go.
        factor: By how much positions are compressed.
        original_length: Length the model was trained for before stretching (llama3, yarn).
        low_freq_factor: llama3: wavelengths above ``original_length`` over this are stretched.
        high_freq_factor: llama3: wavelengths below ``original_length`` over this are kept.
        beta_fast: yarn: dimensions with more rotations than this are kept.
        beta_slow: yarn: dimensions with fewer rotations than this are stretched.
        truncate: yarn: whether those bounds are whole dimensions.
        attention_factor: yarn: cosines and sines are multiplied by it.
        share: How much of a head is rotated, from its first element on.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's shape and habits.

    Attributes:
        name: The directory's name, for people.
        architecture: The class transformers would use, for example ``"LlamaForCausalLM"``.
        model_type: The architecture's short name, for example ``"llama"``.
        vocab_size: Tokens the model has logits for (V).
        hidden_size: Width of a hidden state (E).
        intermediate_size: Width inside the MLP.
        num_layers: Decoder layers (L).
        num_heads: Query heads (H).
        num_kv_heads: Key and value heads (K); divides ``num_heads``.
        head_dim: Size of a head (D).
        max_position_embeddings: Most tokens of prompt and answer the model was made for.
        norm_eps: Keeps norms away from a division by zero.
        layer_kinds: What kind of attention each layer has, one of `LAYER_KINDS`.
        sliding_window: A token sees this many tokens in layers of that kind, itself included.
        ropes: Position embedding of each kind of layer, for families that rotate.
        tie_word_embeddings: Whether the head is the embedding table.
        attention_bias: Whether the attention's projections have a bias.
        mlp_bias: Whether the MLP's projections have a bias.
        hidden_act: The MLP's activation.
        eos_token_ids: Tokens that end an answer.
        bos_token_id: Token that begins a text, if there is one.
        dtype: Data type of the checkpoint.
        raw: All of ``config.json``: what one family alone needs, it reads itself.
    """

    name: str
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    layer_kinds: tuple[str, ...]
    sliding_window: int | None
    ropes: dict[str, RopeConfig]
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    dtype: str
    raw: dict[str, Any] = field(repr=False)

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Reads ``config.json`` and ``generation_config.json``.

        Raises:
            NotFoundError: There is no such directory, or no ``config.json`` in it.
            InvalidArgumentError: A file is corrupt, a field is missing, or the architecture is
                unknown.
        """
        raw = _read_config(path)
        file = path / CONFIG_FILE
        if raw.get("quantization_config"):
            raise InvalidArgumentError(f"{file}: quantised checkpoints are not supported")
        generation = path / GENERATION_CONFIG_FILE
        eos = _token_ids(raw, file)
        if generation.is_file():
            eos |= _token_ids(_read_json(generation), generation)
        try:
            return cls._from_raw(raw, path.resolve().name, eos)
        except KeyError as error:
            raise InvalidArgumentError(f"{file}: {error.args[0]!r} is missing") from error
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{file}: {error.message}") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise InvalidArgumentError(f"{file} is not a model's config: {error}") from error

    @classmethod
    def _from_raw(cls, raw: dict[str, Any], name: str, eos: frozenset[int]) -> "ModelConfig":
        architecture = str((raw.get("architectures") or [""])[0])
        check_architecture(architecture)
        hidden = int(_named(raw, "hidden_size", "n_embd"))
        heads = int(_named(raw, "num_attention_heads", "n_head"))
        num_layers = int(_named(raw, "num_hidden_layers", "n_layer"))
        window = _sliding_window(raw)
        config = cls(
            name=name,
            architecture=architecture,
            model_type=str(raw["model_type"]),
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            # GPT-2 leaves it out where it is what everybody's was.
            intermediate_size=int(
                _named(raw, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
            ),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            max_position_embeddings=int(_named(raw, "max_position_embeddings", "n_positions")),
            norm_eps=float(
                _named(raw, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6)
            ),
            layer_kinds=_layer_kinds(raw, num_layers, window),
            sliding_window=window,
            ropes=_ropes(raw),
            tie_word_embeddings=bool(
                raw.get("tie_word_embeddings", raw["model_type"] in _TIED_UNLESS_SAID)
            ),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            hidden_act=str(
                _named(
                    raw, "hidden_act", "hidden_activation", "activation_function", default="silu"
                )
            ),
            eos_token_ids=eos,
            bos_token_id=_optional_int(raw.get("bos_token_id")),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            raw=raw,
        )
        config._check()
        return config

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "head_dim"):
            if getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "at least 1")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise invalid("num_key_value_heads", self.num_kv_heads, f"divides {self.num_heads}")
        if self.head_dim % 2:
            raise invalid("head_dim", self.head_dim, "an even number")

    def require(self, field: str, *allowed: object) -> None:
        """Raises `InvalidArgumentError` unless a field of ``config.json`` has an allowed value.

        Args:
            field: Its name.
            allowed: The first one is what leaving it out means.
        """
        value = self.raw.get(field, allowed[0])
        if value not in allowed:
            raise invalid(field, value, ", ".join(map(repr, allowed)))

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in this layer, itself included; None sees all."""
        return self.sliding_window if self.layer_kinds[layer] == SLIDING else None

    def rope(self, layer: int) -> "RopeConfig":
        """This layer's position embedding."""
        return self.ropes[self.layer_kinds[layer]]


def resolve_dtype(requested: str, config: ModelConfig) -> str:
    """The data type to compute in.

    ``auto`` takes the fastest this processor has: bfloat16 where it multiplies bfloat16 matrices
    in hardware, else float32 (without that, bfloat16 is some eight times slower than float32).
    A float32 checkpoint keeps its precision either way.
    """
    if requested != "auto":
        return requested
    return "bfloat16" if config.dtype != "float32" and _multiplies_bfloat16() else "float32"


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise NotFoundError(f"model directory {path} does not exist")
    file = path / CONFIG_FILE
    if not file.is_file():
        raise NotFoundError(
            f"{file} does not exist; `splitserve model import` turns other formats into this one"
        )
    return _read_json(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{file} must hold a JSON object")
    return value


def _token_ids(raw: dict[str, Any], file: Path) -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise InvalidArgumentError(f"{file}: eos_token_id must hold token ids, not {value!r}")
    return frozenset(ids)


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _named(raw: dict[str, Any], *names: str, default: Any = None) -> Any:
    """What stands under the first of these names; families call the same thing differently."""
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    if default is None:
        raise KeyError(names[0])
    return default


def _sliding_window(raw: dict[str, Any]) -> int | None:
    # Qwen's configs name a window and whether it is meant.
    return _optional_int(raw.get("sliding_window")) if raw.get("use_sliding_window", True) else None


_TIED_UNLESS_SAID = ("gemma2", "gemma3_text", "gpt2", "opt")

_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Checkpoints written before ``layer_types``: every how many layers attention is full."""


def _layer_kinds(raw: dict[str, Any], num_layers: int, window: int | None) -> tuple[str, ...]:
    if window is None:
        return (FULL,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        every = raw.get("sliding_window_pattern") or _FULL_EVERY.get(raw["model_type"])
        first = int(raw.get("max_window_layers", 0)) if "use_sliding_window" in raw else 0
        kinds = [
            FULL if layer < first or (every and (layer + 1) % every == 0) else SLIDING
            for layer in range(num_layers)
        ]
    for kind in kinds:
        if kind not in LAYER_KINDS:
            raise invalid("layer_types", kind, ", ".join(LAYER_KINDS))
    if len(kinds) != num_layers:
        raise invalid("layer_types", len(kinds), f"one for each of the {num_layers} layers")
    return tuple(kinds)


def _ropes(raw: dict[str, Any]) -> dict[str, RopeConfig]:
    """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older checkpoints."""
    spec = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if set(spec) & set(LAYER_KINDS):
        return {kind: _rope(raw, spec[kind]) for kind in LAYER_KINDS if kind in spec}
    ropes = dict.fromkeys(LAYER_KINDS, _rope(raw, spec))
    if raw.get("rope_local_base_freq"):
        ropes[SLIDING] = RopeConfig(theta=float(raw["rope_local_base_freq"]))
    return ropes


def _rope(raw: dict[str, Any], spec: dict[str, Any]) -> RopeConfig:
    theta = spec.get("rope_theta") or raw.get("rope_theta") or raw.get("rotary_emb_base")
    share = _named({**raw, **spec}, "partial_rotary_factor", "rotary_pct", default=1.0)
    rope = _stretched(raw, spec, float(theta or 10000.0))
    return replace(rope, share=float(share))


def _stretched(raw: dict[str, Any], spec: dict[str, Any], theta: float) -> RopeConfig:
    kind = str(spec.get("rope_type") or spec.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise invalid("rope_type", kind, ", ".join(ROPE_KINDS))
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta, kind=kind)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=float(spec["factor"]))
    length = int(spec.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=float(spec["factor"]),
            original_length=length,
            low_freq_factor=float(spec["low_freq_factor"]),
            high_freq_factor=float(spec["high_freq_factor"]),
        )
    factor = float(spec.get("factor") or int(raw["max_position_embeddings"]) / length)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_length=length,
        beta_fast=float(spec.get("beta_fast") or 32),
        beta_slow=float(spec.get("beta_slow") or 1),
        truncate=bool(spec.get("truncate", True)),
        attention_factor=_yarn_attention_factor(spec, factor),
    )


def _yarn_attention_factor(spec: dict[str, Any], factor: float) -> float:
    """Sharpening of the attention that goes with a stretch (YaRN, Peng et al., 2023, §3.4)."""
    if spec.get("attention_factor") is not None:
        return float(spec["attention_factor"])

    def gain(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = spec.get("mscale"), spec.get("mscale_all_dim")
    if numerator and denominator:
        return gain(float(numerator)) / gain(float(denominator))
    return gain(1.0)


@cache
def _multiplies_bfloat16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    wanted = {"bf16"} if platform.machine() == "aarch64" else {"avx512_bf16", "amx_bf16"}
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return not wanted.isdisjoint(line.partition(":")[2].split())
    return False
