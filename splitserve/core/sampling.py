"""What a client asks of the sampler."""

import math
from dataclasses import dataclass

from splitserve.core.errors import invalid

DEFAULT_MAX_TOKENS = 256
"""Tokens generated when a client names no limit; clamped to what the context leaves."""

MAX_LOGPROBS = 20
MAX_ANSWERS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1_000
MAX_STOP_TOKEN_IDS = 128
MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1
"""Upper bound of counts that have no tighter one."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Frozen, and valid once constructed.

    Attributes:
        max_tokens: Most tokens to generate; None takes `DEFAULT_MAX_TOKENS`.
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Keep the k most likely tokens; 0 keeps all.
        min_p: Drop tokens less likely than this share of the most likely one, in [0, 1].
        seed: Equal seeds give equal tokens; None lets the router draw one.
        stop: Texts that end the generation; they are cut from the answer.
        stop_token_ids: Tokens that end the generation.
        ignore_eos: Go on past the model's end-of-sequence token.
        presence_penalty: Subtracted from the logit of every token generated so far.
        frequency_penalty: The same, once per occurrence.
        repetition_penalty: Divides positive logits (multiplies negative ones) of tokens in
            prompt and answer (Keskar et al., 2019).
        logprobs: Report each token's log-probability and those of this many likely ones.
        n: Answers per prompt; answer i draws as one alone of ``seed + i`` does.

    Raises:
        InvalidArgumentError: A field is outside what is allowed.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise invalid("stop", self.stop, "a sequence of strings")
        # Callers may pass lists; the frozen value holds tuples.
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_int("n", self.n, 1, MAX_ANSWERS)
        _check_int("top_k", self.top_k, 0, MAX_COUNT)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise invalid("stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise invalid("stop", text, f"1 to {MAX_STOP_STRING_CHARS} characters each")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid(
                "stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS} ids"
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, MAX_COUNT)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler needs to know earlier tokens."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _check_int(field: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise invalid(field, value, f"an integer from {low} to {high}")


def _check_float(
    field: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (open_low and value == low):
        raise invalid(field, value, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")
