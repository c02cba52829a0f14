import json
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from splitserve.core.errors import InvalidArgumentError
from splitserve.text import chat
from splitserve.text.chat import ChatMessage, ChatTemplate

HI = [ChatMessage("user", "hi")]


def write_config(path: Path, **values: object) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return path


def test_chatml_is_rendered_as_the_model_was_trained(tmp_path: Path) -> None:
    template = ChatTemplate.from_dir(write_tiny_model(tmp_path))
    messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "Ahoi <b> 🙂")]
    body = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAhoi <b> 🙂<|im_end|>\n"
    assert template.render(messages) == body + "<|im_start|>assistant\n"
    assert template.render(messages, add_generation_prompt=False) == body


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    write_config(tmp_path, chat_template="config")
    assert ChatTemplate.from_dir(tmp_path).render(HI) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_dir(tmp_path).render(HI) == "file"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert ChatTemplate.from_dir(write_config(tmp_path, chat_template=named)).render(HI) == "d"


@pytest.mark.parametrize("value", [7, [{"name": "rag", "template": "r"}], ["x"], [{}]])
def test_a_config_without_a_default_template_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tokenizer_config\.json.*default"):
        ChatTemplate.from_dir(write_config(tmp_path, chat_template=value))


def test_a_template_that_is_no_jinja_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tokenizer_config\.json: not a valid templ"):
        ChatTemplate.from_dir(write_config(tmp_path, chat_template="{% for %}"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0]['role'] + messages[0].role.upper() }}", "userUSER"),
    ],
)
def test_what_hugging_face_templates_need_is_there(source: str, text: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(HI) == text


def test_an_unknown_role_is_refused_by_place_and_name() -> None:
    messages = [*HI, ChatMessage("assistant", "yes"), ChatMessage("robot", "beep")]
    with pytest.raises(InvalidArgumentError) as caught:
        ChatTemplate("x").render(messages)
    for part in ("chat.messages[2].role", "'robot'", "system, user, assistant, tool"):
        assert part in caught.value.message


@pytest.mark.parametrize("count", [0, 4097])
def test_the_number_of_messages_is_bounded(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"chat\.messages: "):
        ChatTemplate("x").render(HI * count)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        ChatTemplate.from_dir(tmp_path).render(HI)


def test_a_refusal_of_the_template_reaches_the_client() -> None:
    with pytest.raises(InvalidArgumentError, match="refuses: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[5].content }}",
        "{{ missing.attribute }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_an_error_of_ours_and_not_a_traceback(source: str) -> None:
    with pytest.raises(InvalidArgumentError, match="chat: the model's template fails"):
        ChatTemplate(source).render(HI)


def test_a_runaway_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_TEMPLATE_GROWTH_CHARS", 1_000)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(InvalidArgumentError, match="more than 1008 characters"):
        ChatTemplate(source).render(HI)


def test_long_messages_are_no_runaway_template() -> None:
    text = "x" * 3_000_000
    assert ChatTemplate("{{ messages[0].content }}").render([ChatMessage("user", text)]) == text
