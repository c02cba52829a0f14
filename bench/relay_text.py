"""What the router question's servers answer: tokens of ordinary text, whatever was asked."""

FIRST_TOKEN = 1_000
NUM_TOKENS = 20_000
"""Behind the marks and single bytes, and before rare words, of a vocabulary of 49,152."""


def token_at(position: int) -> int:
    """The token of a place in any answer."""
    return FIRST_TOKEN + position * 7 % NUM_TOKENS
