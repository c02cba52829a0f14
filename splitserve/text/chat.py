"""Chat messages to a prompt, by the model's own template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitserve.core.config import MAX_CHAT_MESSAGES
from splitserve.core.errors import InvalidArgumentError, invalid
from splitserve.text.tokenizer import TOKENIZER_CONFIG_FILE, read_json, read_special_tokens

CHAT_TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("system", "user", "assistant", "tool")

MAX_TEMPLATE_GROWTH_CHARS = 2**20
"""Most characters a template may add to its messages."""

MAX_MESSAGE_REPEATS = 4
"""How often a template may write the messages' text."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: Who speaks; one of `ROLES`.
        content: What they say.
    """

    role: str
    content: str


class ChatTemplate:
    """A model's chat template.

    Text in a message that spells a special token, such as ``<|im_end|>``, becomes that token
    when the prompt is encoded: a client can forge turns of its own conversation. Hugging Face
    does the same, templates and models rely on it, and it reaches nobody else's request.

    Args:
        source: The template; None for a model without one.
        special_tokens: What the template may write by name, such as ``bos_token``.
        origin: The file the template is from, for messages.

    Raises:
        InvalidArgumentError: The template is no valid Jinja.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "chat template",
    ) -> None:
        self._special_tokens = dict(special_tokens or {})
        self._template: Template | None = None
        if source is None:
            return
        try:
            self._template = _environment().from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise InvalidArgumentError(f"{origin}: not a valid template: {error}") from error

    @classmethod
    def from_dir(cls, path: Path) -> "ChatTemplate":
        """Reads the template of a directory in the Hugging Face format; it may have none.

        Raises:
            InvalidArgumentError: A file is corrupt.
        """
        file = path / CHAT_TEMPLATE_FILE
        tokens = read_special_tokens(path)
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), tokens, str(file))
            except UnicodeDecodeError as error:
                raise InvalidArgumentError(f"{file} is not UTF-8: {error}") from error
        config = path / TOKENIZER_CONFIG_FILE
        source = _source(read_json(config).get("chat_template"), config)
        return cls(source, tokens, str(config))

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; encode it without adding special tokens.

        Args:
            messages: Oldest first.
            add_generation_prompt: End with what makes the model answer.

        Raises:
            InvalidArgumentError: The messages are empty, too many or of an unknown role; the
                model has no template; or its template refuses or fails.
        """
        _check(messages)
        if self._template is None:
            raise InvalidArgumentError(
                "chat: this model has no chat template; send a prompt or token_ids instead"
            )
        limit = MAX_TEMPLATE_GROWTH_CHARS + MAX_MESSAGE_REPEATS * sum(
            len(message.content) for message in messages
        )
        chunks, size = [], 0
        try:
            for chunk in self._template.generate(self._variables(messages, add_generation_prompt)):
                size += len(chunk)
                if size > limit:
                    raise InvalidArgumentError(
                        f"chat: the model's template writes more than {limit} characters"
                    )
                chunks.append(chunk)
        except _TemplateRefusal as error:
            raise InvalidArgumentError(f"chat: the model's template refuses: {error}") from error
        except InvalidArgumentError:
            raise
        except Exception as error:  # A template is a program and can fail in any way.
            raise InvalidArgumentError(
                f"chat: the model's template fails on these messages: {error}"
            ) from error
        return "".join(chunks)

    def _variables(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool
    ) -> dict[str, Any]:
        return self._special_tokens | {
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            # Templates ask whether these are none, not whether they are defined.
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }


class _TemplateRefusal(TemplateError):  # noqa: N818  (not a failure of the template)
    """What a template raises itself, such as that roles must alternate."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; serving just writes them."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML, which a model was not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _source(value: object, file: Path) -> str | None:
    """The template in a tokenizer's config: one string, or a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
        source = named["default"]
    except (TypeError, KeyError) as error:
        raise InvalidArgumentError(f"{file}: chat_template has no template 'default'") from error
    if not isinstance(source, str):
        raise InvalidArgumentError(f"{file}: chat_template 'default' must be a string")
    return source


def _check(messages: Sequence[ChatMessage]) -> None:
    if not 0 < len(messages) <= MAX_CHAT_MESSAGES:
        raise invalid("chat.messages", len(messages), f"1 to {MAX_CHAT_MESSAGES} messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise invalid(f"chat.messages[{index}].role", message.role, ", ".join(ROLES))
