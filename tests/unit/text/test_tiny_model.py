import json
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from splitserve.text.tokenizer import Tokenizer


def test_a_tiny_model_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b")
    names = sorted(file.name for file in first.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [(first / n).read_bytes() for n in names] == [(second / n).read_bytes() for n in names]


@pytest.mark.parametrize("vocab_size", [259, 512, 2_000])
def test_a_tiny_model_has_exactly_the_vocabulary_asked_for(tmp_path: Path, vocab_size: int) -> None:
    write_tiny_model(tmp_path, vocab_size=vocab_size)
    assert Tokenizer.from_dir(tmp_path).vocab_size == vocab_size
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == vocab_size
