"""Identity of a model: nodes of one router must agree on it. Imports no torch."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from splitserve.core.errors import InvalidArgumentError, NotFoundError
from splitserve.model.config import TOKENIZER_FILE, ModelConfig

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


def fingerprint(model_dir: Path, *, dummy_seed: int | None, quantization: str = "none") -> str:
    """Identity of a model: the same on every host for the same files.

    Rounded weights are another model: its KV is not what the unrounded one would have computed.

    Args:
        model_dir: The model's directory.
        dummy_seed: Seed of dummy weights; None for the weights in the directory.
        quantization: How weights are kept.

    Returns:
        `architecture_fingerprint`, a dash, and 16 hex digits of the weights; unless they are kept
        as they are, another dash and how.

    Raises:
        NotFoundError: There are no weights.
        InvalidArgumentError: A file is corrupt.
    """
    digest = sha256()
    if dummy_seed is not None:
        digest.update(f"dummy weights of seed {dummy_seed}".encode())
    else:
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            raise NotFoundError(f"{model_dir} holds no *.safetensors")
        for file in files:
            _hash_sampled(digest, file)
    suffix = "" if quantization == "none" else f"-{quantization}"
    return f"{architecture_fingerprint(model_dir)}-{digest.hexdigest()[:16]}{suffix}"


def architecture_fingerprint(model_dir: Path) -> str:
    """16 hex digits of a model's shape and vocabulary; weights need not be there."""
    fields = asdict(ModelConfig.from_dir(model_dir))
    # The directory may have another name elsewhere; the vocabulary is in the tokenizer.
    del fields["name"]
    fields["eos_token_ids"] = sorted(fields["eos_token_ids"])
    digest = sha256(json.dumps(fields, sort_keys=True).encode())
    tokenizer = model_dir / TOKENIZER_FILE
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()[:16]


def _hash_sampled(digest: Any, file: Path) -> None:
    """Takes in a safetensors file's name, size, header and evenly spread samples of its data.

    Reading all of a large model would take minutes; another training step changes every tensor.
    """
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > size - 8:
            raise InvalidArgumentError(f"{file} is truncated or not a safetensors file")
        digest.update(stream.read(header_bytes))
        begin = 8 + header_bytes
        for sample in range(_SAMPLES_PER_FILE):
            stream.seek(begin + (size - begin) * sample // _SAMPLES_PER_FILE)
            digest.update(stream.read(_SAMPLE_BYTES))
