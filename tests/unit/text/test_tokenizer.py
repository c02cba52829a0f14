import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_model import IM_END, IM_START, train_tokenizer, write_tiny_model
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors

from splitserve.core.errors import InvalidArgumentError, NotFoundError
from splitserve.text.chat import ChatMessage, ChatTemplate
from splitserve.text.detokenizer import Detokenizer
from splitserve.text.tokenizer import Tokenizer

BOS_WRITING_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
BOS_ID = 1


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def set_config(model: Path, **values: object) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def add_bos_post_processor(model: Path) -> None:
    file = str(model / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{IM_START} $A", pair=None, special_tokens=[(IM_START, BOS_ID)]
    )
    backend.save(file)


def test_text_survives_encoding_and_decoding(model: Path) -> None:
    tokenizer = Tokenizer.from_dir(model)
    text = "The ferry 🚀 灯塔 café\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text


def test_special_tokens_are_known_by_name_and_id(model: Path) -> None:
    tokenizer = Tokenizer.from_dir(model)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (IM_START, IM_END)
    assert [tokenizer.is_special(i) for i in range(4)] == [True, True, True, False]
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == IM_START + IM_END


def test_a_named_token_is_special_even_if_the_vocabulary_does_not_say_so(model: Path) -> None:
    backend = train_tokenizer(512)
    backend.add_tokens(["<end>"])
    tokenizer = Tokenizer(backend, {"eos_token": "<end>", "pad_token": "<not there>"})
    assert tokenizer.is_special(512)
    assert tokenizer.vocab_size == 513
    assert tokenizer.decode([512]) == ""


def test_special_tokens_come_from_the_older_file_too(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    special = {"bos_token": {"content": IM_START, "lstrip": False}, "eos_token": IM_END}
    (model / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = Tokenizer.from_dir(model)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (IM_START, IM_END)


def test_fault_35_a_template_that_writes_bos_gives_one_bos(model: Path) -> None:
    add_bos_post_processor(model)
    set_config(model, chat_template=BOS_WRITING_TEMPLATE)
    text = ChatTemplate.from_dir(model).render([ChatMessage("user", "hi")])
    ids = Tokenizer.from_dir(model).encode(text, add_special_tokens=False)
    assert ids.count(BOS_ID) == 1
    assert ids[0] == BOS_ID


def test_fault_35_a_template_that_writes_no_bos_gets_none(model: Path) -> None:
    add_bos_post_processor(model)
    set_config(model, chat_template="{{ messages[0].content }}")
    text = ChatTemplate.from_dir(model).render([ChatMessage("user", "hi")])
    assert BOS_ID not in Tokenizer.from_dir(model).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("post_processor", [True, False])
def test_fault_35_the_post_processor_decides_about_bos_of_a_plain_prompt(
    model: Path, add_bos_token: bool | None, post_processor: bool
) -> None:
    if post_processor:
        add_bos_post_processor(model)
    if add_bos_token is not None:
        set_config(model, add_bos_token=add_bos_token)
    ids = Tokenizer.from_dir(model).encode("hi", add_special_tokens=True)
    assert ids.count(BOS_ID) == post_processor


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(model: Path) -> None:
    file = str(model / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(file)
    tokenizer = Tokenizer.from_dir(model)
    assert tokenizer.decode(tokenizer.encode("hi", add_special_tokens=True)) == "hi"
    assert len(tokenizer.encode("hi", add_special_tokens=True)) < 4
    assert len(tokenizer.encode("hi" * 20, add_special_tokens=True)) > 4


def test_a_missing_tokenizer_is_named_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"tokenizer\.json.*splitserve model import"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_corrupt_file_is_named(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=name):
        Tokenizer.from_dir(model)


@pytest.mark.parametrize("decoder", [decoders.CTC(), decoders.Strip(" ", 0, 1)])
def test_a_decoder_that_cannot_stream_is_refused_at_start(
    model: Path, decoder: decoders.Decoder
) -> None:
    file = str(model / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.decoder = decoder
    backend.save(file)
    with pytest.raises(InvalidArgumentError, match="decoder"):
        Tokenizer.from_dir(model)


def test_encoding_a_long_text_lets_other_threads_run(model: Path) -> None:
    tokenizer = Tokenizer.from_dir(model)
    text = "The ferry leaves the harbour at seven. " * 40_000
    thread = threading.Thread(
        target=tokenizer.encode, args=(text,), kwargs={"add_special_tokens": False}
    )
    thread.start()
    turns = 0
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 10  # With the interpreter lock held it is two or three.


def test_one_tokenizer_serves_many_threads(model: Path) -> None:
    tokenizer = Tokenizer.from_dir(model)
    texts = [f"number {n} 灯塔 " * 20 for n in range(64)]

    def there_and_back(text: str) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, [])
        return "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, texts)) == texts
