from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from splitserve.core.config import MAX_MESSAGE_BYTES
from splitserve.core.errors import InvalidArgumentError
from splitserve.core.sampling import SamplingParams
from splitserve.messages import checked_timeout, generate_request


@dataclass
class Turn:
    role: str
    content: str


def build(**given: Any) -> Any:
    known = {"prompt": None, "token_ids": None, "chat": None, "sampling": None, "request_id": ""}
    return generate_request(**(known | given))


@pytest.mark.parametrize("given", [{}, {"prompt": "a", "token_ids": [1]}])
def test_there_is_exactly_one_input(given: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="exactly one of prompt, token_ids and chat"):
        build(**given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompt": "ab\ud800"}, "prompt: character 2"),
        ({"prompt": "a", "request_id": "\udfff"}, "request_id: character 0"),
        ({"prompt": "a", "sampling": SamplingParams(stop=("\ud800",))}, "stop: character 0"),
        ({"chat": [Turn("user", "a"), Turn("user", "\ud800")]}, r"chat.messages\[1\].content"),
    ],
)
def test_text_that_utf8_cannot_carry_is_refused_before_it_is_sent(
    given: Mapping[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        build(**given)


@pytest.mark.parametrize("token_id", [-1, 2**32, 1.5, "7"])
def test_a_token_id_that_cannot_be_one_is_named(token_id: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        build(token_ids=[1, token_id])


def test_token_ids_may_come_from_an_array() -> None:
    assert list(build(token_ids=np.array([1, 2])).token_ids.ids) == [1, 2]


def test_empty_inputs_are_sent_as_what_they_are() -> None:
    assert build(prompt="").WhichOneof("input") == "prompt"
    assert build(token_ids=[]).WhichOneof("input") == "token_ids"
    assert build(chat=[]).WhichOneof("input") == "chat"


def test_turns_may_be_mappings_or_objects() -> None:
    request = build(chat=[{"role": "system", "content": "Be brief."}, Turn("user", "Hi")])
    turns = [(turn.role, turn.content) for turn in request.chat.messages]
    assert turns == [("system", "Be brief."), ("user", "Hi")]


@pytest.mark.parametrize("turn", [{"role": "user"}, ("user", "Hi"), {"role": 1, "content": "a"}])
def test_a_turn_without_role_or_content_is_named_by_its_place(turn: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"chat.messages\[0\]"):
        build(chat=[turn])


def test_a_message_that_no_router_takes_is_not_sent() -> None:
    with pytest.raises(InvalidArgumentError, match=str(MAX_MESSAGE_BYTES)):
        build(prompt="a" * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_time(timeout: float) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout"):
        checked_timeout(timeout)
