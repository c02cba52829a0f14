"""Tokens to text as they come, in whole characters.

The library's own `DecodeStream` is not used: it decodes its window again for every token and
moves it on only at valid text, so that a run of n invalid bytes costs n² (0.5 ms a token at
4,000), and it raises where such a run changes what it has already given out.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from splitserve.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_INCOMPLETE_BYTES = 3
"""Most bytes of a UTF-8 character that is not complete."""


class Detokenizer:
    """Text of one answer, delta by delta.

    All deltas and `flush` together are what decoding prompt and answer at once adds to the
    prompt's text, whatever the sizes of the pushes. U+FFFD appears only for bytes that can no
    longer become a character, as it does there. Special tokens have no text.

    The state follows from the tokens alone: after a failover, push the answer's tokens again.

    Args:
        tokenizer: The model's.
        prompt_ids: What the answer follows; it decides about a leading space, and may end
            inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        stream = _ByteStream if tokenizer.byte_level else _PieceStream
        self._stream: _Stream = stream(tokenizer, prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before; often a word, perhaps nothing."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """The rest, once no more tokens come."""
        return self._stream.flush()


class _Stream(Protocol):
    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Byte-level vocabularies: the text is the tokens' bytes, read as UTF-8."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= MAX_INCOMPLETE_BYTES:
                break
            tail = self._token_bytes(token_id) + tail
        self._utf8.decode(tail[-MAX_INCOMPLETE_BYTES:])
        # The prompt's text shows its unfinished character as U+FFFD already. If the answer
        # finishes it, the character is the answer's; if not, the U+FFFD is not. (Two of them
        # for half a surrogate, which Python's decoder holds though nothing can finish it.)
        unfinished, _ = self._utf8.getstate()
        self._not_ours = unfinished.decode(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._own(self._utf8.decode(b"".join(map(self._token_bytes, token_ids))))

    def flush(self) -> str:
        return self._own(self._utf8.decode(b"", final=True))

    def _own(self, text: str) -> str:
        if self._not_ours and text:
            text, self._not_ours = text.removeprefix(self._not_ours), ""
        return text


class _PieceStream:
    """Vocabularies of text pieces, perhaps with bytes for characters they lack.

    A piece's text depends only on whether anything comes before it, so one earlier token is
    context enough. Bytes are different: the decoder reads a run of them as a whole, as text if
    all of it is valid and as one U+FFFD per byte otherwise. The run's text is certain when the
    run ends, so it waits until then; each token is still decoded once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._is_text = tokenizer.is_text
        self._bytes = tokenizer.fallback_bytes
        self._context: list[int] = []
        self._context_chars = 0
        self._run: list[int] = []
        for token_id in reversed(prompt_ids):
            if not self._is_text(token_id):
                continue
            if token_id not in self._bytes:
                self._set_context(token_id)
                break
            self._run.append(token_id)
        self._run.reverse()
        self._prompt_bytes = len(self._run)

    def push(self, token_ids: Sequence[int]) -> str:
        ids = [token_id for token_id in token_ids if self._is_text(token_id)]
        settled = len(ids)
        while settled and ids[settled - 1] in self._bytes:
            settled -= 1
        if not settled:
            self._run += ids
            return ""
        text = self._text_of(self._run + ids[:settled])
        self._run = ids[settled:]
        self._set_context(ids[settled - 1])
        return text

    def flush(self) -> str:
        run, self._run = self._run, []
        return self._text_of(run) if run else ""

    def _set_context(self, token_id: int) -> None:
        self._context = [token_id]
        self._context_chars = len(self._decode(self._context))

    def _text_of(self, ids: list[int]) -> str:
        text = self._decode(self._context + ids)[self._context_chars :]
        if self._prompt_bytes:
            text = text[self._prompt_chars(ids) :]
            self._prompt_bytes = 0
        return text

    def _prompt_chars(self, ids: list[int]) -> int:
        """Characters of the prompt in a run of bytes that the prompt began."""
        values = []
        for token_id in ids:
            if token_id not in self._bytes:
                break
            values.append(self._bytes[token_id])
        run = bytes(values)
        try:
            run.decode()
        except UnicodeDecodeError:
            return self._prompt_bytes  # One U+FFFD per byte.
        complete = len(run[: self._prompt_bytes].decode(errors="ignore").encode())
        return len(self._decode(self._context + ids[:complete])) - self._context_chars
