"""transformers is the judge of what a prompt's tokens are."""

from pathlib import Path
from typing import Any

import pytest
from tiny_model import CORPUS, write_tiny_model

from splitserve.text.chat import ChatMessage, ChatTemplate
from splitserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def judge(model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model)


def test_plain_prompts_have_the_same_tokens(model: Path, judge: Any) -> None:
    text = CORPUS + "<|im_end|> plain"
    assert Tokenizer.from_dir(model).encode(text, add_special_tokens=True) == judge(text).input_ids


def test_chats_have_the_same_tokens(model: Path, judge: Any) -> None:
    turns = [("system", "s"), ("user", CORPUS), ("assistant", "a"), ("user", "b <|im_end|>")]
    text = ChatTemplate.from_dir(model).render([ChatMessage(*turn) for turn in turns])
    expected = judge.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    assert Tokenizer.from_dir(model).encode(text, add_special_tokens=False) == expected


def test_answers_have_the_same_text(model: Path, judge: Any) -> None:
    ids = [(37 * n) % 512 for n in range(2_000)]
    assert Tokenizer.from_dir(model).decode(ids) == judge.decode(ids, skip_special_tokens=True)
