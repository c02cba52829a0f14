"""The engine question's cases."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

Prompts = Sequence[Sequence[int]]

NEW_TOKENS = 32
"""Tokens a turn decodes for each prompt."""

MAX_BATCH = 256
"""As many sequences as every side has room for by default."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt alone, up to its first token.

    Attributes:
        tokens: Its length.
    """

    tokens: int

    @property
    def name(self) -> str:
        """For people."""
        return f"prefill, {self.tokens:,} tokens"

    @property
    def batch(self) -> int:
        """Prompts at once."""
        return 1

    @property
    def length(self) -> int:
        """Tokens of the prompt and what follows it."""
        return self.tokens + 1


@dataclass(frozen=True, slots=True)
class Decode:
    """`NEW_TOKENS` steps of one batch.

    Attributes:
        batch: Prompts in it.
        context: Tokens of each prompt.
    """

    batch: int
    context: int

    @property
    def name(self) -> str:
        """For people."""
        return f"decode, batch {self.batch}, context {self.context:,}"

    @property
    def length(self) -> int:
        """Tokens of each prompt and what follows it."""
        return self.context + 1 + NEW_TOKENS


Case = Prefill | Decode


def prompts(seed: int, count: int, length: int, vocab_size: int) -> Prompts:
    """Random tokens, the same for both sides."""
    source = random.Random(f"{seed} {count} {length}")
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
