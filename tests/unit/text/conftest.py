"""Two kinds of vocabulary that decode differently, and one more decoder."""

import json

import pytest
from hypothesis import settings
from tiny_model import CORPUS, SPECIAL_TOKENS, train_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from splitserve.text.tokenizer import Tokenizer

# A busy machine must not fail a property for being slow; pytest's own limit stops one that hangs.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

LLAMA_SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def byte_level() -> Tokenizer:
    backend = train_tokenizer(512)
    # An added word that is not special decodes as its own text, not through the byte alphabet.
    backend.add_tokens(["plain words", "日本"])
    return Tokenizer(backend, {"eos_token": SPECIAL_TOKENS[2]})


def llama_like(decoder: decoders.Decoder) -> Tokenizer:
    """Pieces with ``▁`` for a space and bytes for characters that have no piece, as Llama 2."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Backend(models.BPE())
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(
        [line for line in CORPUS.splitlines() if line.isascii()],
        trainers.BpeTrainer(vocab_size=300, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    words = [*LLAMA_SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    words += sorted(model["vocab"], key=model["vocab"].__getitem__)
    backend = Backend(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[tuple(merge) for merge in model["merges"]],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizer
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in LLAMA_SPECIAL.values()])
    return Tokenizer(backend, LLAMA_SPECIAL)


def metaspace_with_fallback() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def llama_tokenizer() -> Tokenizer:
    return llama_like(metaspace_with_fallback())


@pytest.fixture(scope="session", params=["byte-level", "llama", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte-level":
        return byte_level()
    if request.param == "llama":
        return llama_like(metaspace_with_fallback())
    return llama_like(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
