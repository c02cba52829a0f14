"""From a client's message to tokens, and everything that is wrong with it, before a node hears."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.members import Members
from splitserve.core.config import MAX_INLINE_TEXT_CHARS, MAX_REQUEST_ID_CHARS
from splitserve.core.errors import InvalidArgumentError, invalid
from splitserve.core.sampling import DEFAULT_MAX_TOKENS, SamplingParams
from splitserve.core.ticket import new_epoch
from splitserve.rpc.convert import sampling_from_proto, sampling_to_proto
from splitserve.text.chat import ChatMessage
from splitserve.v1 import common_pb2, router_pb2

SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked, as nodes understand it.

    Attributes:
        token_ids: The prompt, at least one token.
        sampling: With ``max_tokens`` and ``seed`` set.
        node_sampling: The same for nodes, which know no text and so no stop strings.
    """

    token_ids: list[int]
    sampling: SamplingParams
    node_sampling: common_pb2.SamplingParams


class Admission:
    """Reads requests.

    Args:
        members: What model they are for, and how long a request its nodes take.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._model = members.model

    def request_id(self, message: router_pb2.GenerateRequest) -> str:
        """The client's name for the request, or a new one.

        Raises:
            InvalidArgumentError: It is too long, or would break a line of a log.
        """
        name = message.request_id
        if len(name) > MAX_REQUEST_ID_CHARS or not name.isprintable():
            raise invalid(
                "request_id",
                name[:MAX_REQUEST_ID_CHARS],
                f"at most {MAX_REQUEST_ID_CHARS} printable characters",
            )
        return name or new_epoch()

    async def read(self, message: router_pb2.GenerateRequest) -> Prompt:
        """The prompt's tokens and how to sample.

        Raises:
            InvalidArgumentError: The request can never be served as it is.
        """
        sampling = sampling_from_proto(message.sampling)
        for token_id in sampling.stop_token_ids:
            self._check_token("stop_token_ids", token_id)
        tokens = await self._tokens(message)
        self._check_length(message.WhichOneof("input") or "input", len(tokens))
        sampling = self._resolve(sampling, len(tokens))
        return Prompt(tokens, sampling, sampling_to_proto(replace(sampling, stop=())))

    async def _tokens(self, message: router_pb2.GenerateRequest) -> list[int]:
        kind = message.WhichOneof("input")
        if kind is None:
            raise InvalidArgumentError("input: give exactly one of prompt, token_ids and chat")
        if kind == "token_ids":
            return self._given(message.token_ids.ids)
        if kind == "prompt":
            size = len(message.prompt)
        else:
            size = sum(len(turn.content) for turn in message.chat.messages)
        if size > MAX_INLINE_TEXT_CHARS:
            return await asyncio.to_thread(self._encode, message)
        return self._encode(message)

    def _encode(self, message: router_pb2.GenerateRequest) -> list[int]:
        tokenizer = self._model.tokenizer
        if message.HasField("prompt"):
            return tokenizer.encode(message.prompt, add_special_tokens=True)
        turns = [ChatMessage(turn.role, turn.content) for turn in message.chat.messages]
        # The template writes the special tokens itself.
        return tokenizer.encode(self._model.chat_template.render(turns), add_special_tokens=False)

    def _given(self, ids: Sequence[int]) -> list[int]:
        # The length first: nobody makes us look at millions of ids that cannot be served.
        self._check_length("token_ids", len(ids))
        tokens = list(ids)
        self._check_token("token_ids", max(tokens))
        return tokens

    def _check_token(self, field: str, token_id: int) -> None:
        if token_id >= self._model.vocab_size:
            raise invalid(field, token_id, f"ids below {self._model.vocab_size}, the vocabulary")

    def _check_length(self, field: str, length: int) -> None:
        limit = self._members.max_model_len
        if length == 0:
            raise InvalidArgumentError(f"{field}: it has no tokens; at least 1 is needed")
        if length >= limit:
            raise InvalidArgumentError(
                f"{field}: {length} tokens; allowed: at most {limit - 1}, as prompt and answer "
                f"together are limited to {limit}"
            )

    def _resolve(self, sampling: SamplingParams, length: int) -> SamplingParams:
        """Sets what the client left open, for a prompt of this many tokens."""
        left = self._members.max_model_len - length
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = min(DEFAULT_MAX_TOKENS, left)
        elif max_tokens > left:
            raise InvalidArgumentError(
                f"max_tokens: {max_tokens} is not allowed; with a prompt of {length} tokens "
                f"and a limit of {left + length} for both together, at most {left}"
            )
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
        return replace(sampling, max_tokens=max_tokens, seed=seed)
