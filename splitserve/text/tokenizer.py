"""Text to token ids and back, over a model directory's ``tokenizer.json``."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from splitserve.core.errors import InvalidArgumentError, NotFoundError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# Decoders whose text for a token depends on nothing that comes later, but for a run of bytes.
_STREAMABLE = ("ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")


class Tokenizer:
    """A model's tokenizer. Safe to share between threads.

    Attributes:
        special_tokens: Text of the model's named special tokens, such as ``"bos_token"``.
        byte_level: Whether a token is a string of UTF-8 bytes, as in GPT-2's vocabulary.
        fallback_bytes: Byte of each ``<0xNN>`` token, where the vocabulary spells characters
            it lacks in bytes, as Llama 2's does; empty otherwise.

    Raises:
        InvalidArgumentError: Its decoder cannot stream.
    """

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str] | None = None) -> None:
        # A file may carry the truncation and padding of somebody's training run; a served
        # prompt is taken whole or refused.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        # transformers counts every named token as special, whatever the vocabulary says.
        backend.add_special_tokens(
            [t for t in self.special_tokens.values() if backend.token_to_id(t) is not None]
        )
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        steps = _decoder_steps(backend)
        self.byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        if not self.byte_level:
            _check_streamable(steps)
        self.fallback_bytes: dict[int, int] = {}
        if any(step["type"] == "ByteFallback" for step in steps):
            ids = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
            self.fallback_bytes = {i: byte for i, byte in ids if i is not None}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, path: Path) -> "Tokenizer":
        """Reads the tokenizer of a directory in the Hugging Face format.

        Raises:
            NotFoundError: There is no ``tokenizer.json``.
            InvalidArgumentError: A file is corrupt, or the decoder cannot stream.
        """
        file = path / TOKENIZER_FILE
        if not file.is_file():
            raise NotFoundError(
                f"{file} does not exist; `splitserve model import` writes a model's tokenizer"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # The library raises bare Exception.
            raise InvalidArgumentError(
                f"{file} is not a tokenizer ({error}); `splitserve model import` writes a good one"
            ) from error
        return cls(backend, read_special_tokens(path))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: A plain prompt, or a chat's rendered template.
            add_special_tokens: True for a plain prompt: the file's post-processor decides about
                BOS, as in transformers, which ignores ``add_bos_token`` of the config beside a
                ``tokenizer.json``. False for a chat: its template has written BOS or wants none.
        """
        # encode() holds the interpreter lock for as long as it runs; this one does not, and
        # without character offsets it takes a third of the time on long texts.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of all the tokens at once; ids outside the vocabulary have none."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence, if the model has one."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence, if the model has one."""
        return self.special_tokens.get("eos_token")

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a mark of the model's and not text."""
        return token_id in self._special_ids

    def is_text(self, token_id: int) -> bool:
        """Whether decoding keeps a token: in the vocabulary and not special."""
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token of a byte-level vocabulary adds to the text; b"" if nothing."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            if token is None or token_id in self._special_ids:
                return b""  # Not kept: ids outside the vocabulary have no end.
            known = self._bytes[token_id] = _to_bytes(token)
        return known


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file.

    Raises:
        InvalidArgumentError: The file is no JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{file} must hold a JSON object")
    return value


def read_special_tokens(path: Path) -> dict[str, str]:
    """Texts of a model directory's named special tokens; those it lacks are left out."""
    config = read_json(path / TOKENIZER_CONFIG_FILE)
    # The older file counts only where the newer one does not list the added tokens itself.
    if "added_tokens_decoder" not in config:
        config |= read_json(path / SPECIAL_TOKENS_FILE)
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    spec = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return steps


def _check_streamable(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        # What is stripped on the right is known only when the answer is over.
        if step["type"] not in _STREAMABLE or step.get("stop", 0) > 0:
            raise InvalidArgumentError(
                f"{TOKENIZER_FILE}: decoder {step['type']!r} is not supported here; "
                f"supported: ByteLevel alone, or any of {', '.join(_STREAMABLE)}"
            )


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Bytes that print stand for themselves; the others take the code points from 256 on, in
    order (Radford et al., 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()  # An added token is plain text.
