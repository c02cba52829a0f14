"""What a client sends and receives: Python values, and the messages that carry them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.config import MAX_MESSAGE_BYTES
from splitserve.core.errors import InternalError, InvalidArgumentError, invalid
from splitserve.core.lifetime import Lifetime
from splitserve.core.node import NodeStatus
from splitserve.core.request import FinishReason, TokenLogprob
from splitserve.core.sampling import SamplingParams
from splitserve.rpc.convert import (
    finish_reason_from_proto,
    lifetime_from_proto,
    logprob_from_proto,
    node_status_from_proto,
    sampling_to_proto,
)
from splitserve.v1 import router_pb2

MAX_TOKEN_ID = 2**32 - 1


class ChatTurn(Protocol):
    """Anything with a role and a content; `splitserve.text.chat.ChatMessage` is one."""

    @property
    def role(self) -> str:
        """``"system"``, ``"user"``, ``"assistant"`` or ``"tool"``."""

    @property
    def content(self) -> str:
        """What was said."""


Chat = Sequence[ChatTurn | Mapping[str, str]]
"""Turns, oldest first: objects with ``role`` and ``content``, or mappings of both."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens.

    Attributes:
        prompt_tokens: Of the prompt.
        completion_tokens: Of all answers.
        cached_tokens: Of the prompt, those whose KV was there from an earlier request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of an answer.

    Attributes:
        request_id: The request.
        index: Which of ``n`` answers this belongs to.
        text: Text since the last delta.
        token_ids: Tokens since the last delta; their text may follow later.
        logprobs: One per token of this delta, if asked for.
        finish_reason: On each answer's last delta only.
        usage: Of all answers; on the generation's last delta only.
        lifetime: On the generation's last delta only.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    lifetime: Lifetime | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: all its deltas put together.

    Attributes:
        request_id: The request.
        index: Which of ``n`` answers it is.
        text: All of it.
        token_ids: All of them.
        logprobs: One per token, if asked for.
        finish_reason: Why it ended.
        usage: What all answers of the request cost.
        lifetime: The request's.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    usage: Usage | None
    lifetime: Lifetime | None


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A router and all that has joined it.

    Attributes:
        address: Where the router serves.
        model: Name of the model served.
        queued: Requests that have no token yet.
        running: Requests that have streamed a token and are not finished.
        finished: Finished requests by outcome.
        nodes: Every joined node.
    """

    address: str
    model: str
    queued: int
    running: int
    finished: dict[str, int]
    nodes: tuple[NodeStatus, ...]


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    chat: Chat | None,
    sampling: SamplingParams | None,
    request_id: str,
) -> router_pb2.GenerateRequest:
    """The message that asks for an answer to exactly one of prompt, token ids and chat.

    Raises:
        InvalidArgumentError: There is no input or more than one, or it cannot be sent.
    """
    if sum(given is not None for given in (prompt, token_ids, chat)) != 1:
        raise InvalidArgumentError("input: give exactly one of prompt, token_ids and chat")
    request = router_pb2.GenerateRequest(request_id=checked_text("request_id", request_id))
    if prompt is not None:
        request.prompt = checked_text("prompt", prompt)
    elif token_ids is not None:
        request.token_ids.ids.extend(_checked_tokens(token_ids))
        request.token_ids.SetInParent()  # an empty list is an empty prompt, not a missing one
    elif chat is not None:
        request.chat.messages.extend(_turn(index, turn) for index, turn in enumerate(chat))
        request.chat.SetInParent()
    if sampling is not None:
        for text in sampling.stop:
            checked_text("stop", text)
        request.sampling.CopyFrom(sampling_to_proto(sampling))
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(f"input: {size} bytes; allowed: at most {MAX_MESSAGE_BYTES}")
    return request


def delta_from_proto(message: router_pb2.GenerateResponse) -> Delta:
    """The next piece of an answer."""
    usage = lifetime = None
    if message.HasField("usage"):
        told = message.usage
        usage = Usage(told.prompt_tokens, told.completion_tokens, told.cached_tokens)
    if message.HasField("lifetime"):
        lifetime = lifetime_from_proto(message.lifetime)
    return Delta(
        message.request_id,
        message.index,
        message.text,
        tuple(message.token_ids),
        tuple(logprob_from_proto(entry) for entry in message.logprobs),
        finish_reason_from_proto(message.finish_reason),
        usage,
        lifetime,
    )


def status_from_proto(message: router_pb2.RouterStatus) -> ClusterStatus:
    """A router and all that has joined it."""
    return ClusterStatus(
        message.address,
        message.model,
        message.queued,
        message.running,
        dict(message.finished),
        tuple(node_status_from_proto(node) for node in message.nodes),
    )


def completions_of(deltas: Iterable[Delta]) -> list[Completion]:
    """A generation's deltas, put together to its answers."""
    parts: defaultdict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        parts[delta.index].append(delta)
    ended = next((part for own in parts.values() for part in own if part.usage is not None), None)
    if ended is None:
        raise unfinished()
    return [_completion(parts[index], ended) for index in sorted(parts)]


def _completion(parts: Sequence[Delta], ended: Delta) -> Completion:
    finish_reason = parts[-1].finish_reason
    if finish_reason is None:
        raise unfinished()
    return Completion(
        ended.request_id,
        parts[-1].index,
        "".join(part.text for part in parts),
        tuple(token_id for part in parts for token_id in part.token_ids),
        tuple(logprob for part in parts for logprob in part.logprobs),
        finish_reason,
        ended.usage,
        ended.lifetime,
    )


def check_single(sampling: SamplingParams | None) -> None:
    """Refuses to put several answers into one completion.

    Raises:
        InvalidArgumentError: ``n`` is more than 1.
    """
    if sampling is not None and sampling.n > 1:
        raise invalid("n", sampling.n, "1 with completion(); completions() gives all answers")


def unfinished() -> InternalError:
    """What a stream is that ends without a finish reason: a failure, never a short answer."""
    return InternalError("the router ended the answer without a finish reason")


def checked_text(field: str, value: object) -> str:
    """A text that a message can carry.

    Raises:
        InvalidArgumentError: The value is no text, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{field}: {type(value).__name__} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{field}: character {error.start} is a lone surrogate, which UTF-8 cannot carry"
        ) from error
    return value


def checked_timeout(timeout: float | None) -> float | None:
    """A timeout in seconds, or none.

    Raises:
        InvalidArgumentError: It is not a positive, finite number.
    """
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise invalid("timeout", timeout, "a positive, finite number of seconds, or None")
    return timeout


def _checked_tokens(token_ids: Sequence[int]) -> list[int]:
    for token_id in token_ids:
        # An array of numpy's holds integers that are no `int`; the message takes them.
        if not hasattr(token_id, "__index__") or not 0 <= token_id <= MAX_TOKEN_ID:
            raise invalid("token_ids", token_id, f"integers from 0 to {MAX_TOKEN_ID}")
    return [int(token_id) for token_id in token_ids]


def _turn(index: int, turn: ChatTurn | Mapping[str, str]) -> router_pb2.Message:
    field = f"chat.messages[{index}]"
    try:
        role, content = (
            (turn["role"], turn["content"])
            if isinstance(turn, Mapping)
            else (turn.role, turn.content)
        )
    except (KeyError, AttributeError) as error:
        raise InvalidArgumentError(f"{field}: needs a role and a content") from error
    return router_pb2.Message(
        role=checked_text(f"{field}.role", role),
        content=checked_text(f"{field}.content", content),
    )
