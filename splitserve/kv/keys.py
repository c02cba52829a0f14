"""Keys that stand for the tokens of a sequence up to the end of a full block."""

from collections.abc import Sequence
from hashlib import blake2b

PrefixKey = bytes
"""Stands for all tokens up to the end of a full block."""

KEY_BYTES = 16
"""Long enough that no two prefixes ever share a key, also where a client would like them to."""

_TOKEN_BYTES = 4


def extend_keys(
    keys: list[PrefixKey], token_ids: Sequence[int], block_size: int, count: int
) -> None:
    """Appends keys until each of a sequence's first ``count`` blocks has one.

    A key covers its block's tokens and the key before it, and so all tokens up to there.
    """
    for index in range(len(keys), count):
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        text = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in tokens)
        before = keys[-1] if keys else b""
        keys.append(blake2b(before + text, digest_size=KEY_BYTES).digest())
