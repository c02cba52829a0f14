"""A request as a node knows it: tokens, never text."""

import time
from dataclasses import dataclass, field
from enum import Enum

from splitserve.core.errors import SplitserveError
from splitserve.core.lifetime import KvTransfer, LifetimeEvent, LifetimeEventKind
from splitserve.core.sampling import DEFAULT_MAX_TOKENS, SamplingParams


class RequestStatus(Enum):
    """Where a request stands on its node."""

    WAITING = "waiting"
    IMPORTING = "importing"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why an answer ended; the values are the wire's numbers."""

    STOP = 1
    LENGTH = 2
    ABORTED = 3


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability under the model's unmodified distribution.

    Attributes:
        token_id: The generated token.
        logprob: Its log-probability.
        top: The most likely ``(token_id, logprob)`` pairs, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


RequestKey = tuple[str, int]
"""A ticket, and the first of the answers that it stands for."""


@dataclass(slots=True, eq=False)
class Request:
    """One request on one node; on a decode node, one of its answers.

    Attributes:
        request_id: The router's or client's name for it.
        token_ids: Prompt, then what has been generated.
        prompt_length: How many of them are the client's prompt.
        sampling: With ``max_tokens`` and ``seed`` set by the router.
        ticket: The router's name for this attempt.
        indexes: Which of the request's answers, ascending; they have these tokens in common.
        status: Where it stands.
        block_ids: Its KV blocks in token order, on this node.
        computed: Tokens whose KV is in the cache.
        cached: How many of them were there before the request came.
        prefix_keys: Keys of its first full blocks, as far as anybody has asked for them.
        remembered: How many of its full blocks can be found by their keys.
        events: What happened to it that its router has not been told.
    """

    request_id: str
    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    ticket: str
    indexes: tuple[int, ...] = (0,)
    status: RequestStatus = RequestStatus.WAITING
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    prefix_keys: list[bytes] = field(default_factory=list)
    remembered: int = 0
    events: list[LifetimeEvent] = field(default_factory=list)

    @property
    def key(self) -> RequestKey:
        """What its node knows it by."""
        return self.ticket, self.indexes[0]

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate; the router always sets it."""
        limit = self.sampling.max_tokens
        return DEFAULT_MAX_TOKENS if limit is None else limit

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.prompt_length + self.max_tokens

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Takes a sampled token and says whether it ends the answer."""
        reason = self.ends_with(token_id, eos_token_ids)
        self.token_ids.append(token_id)
        return reason

    def ends_with(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Whether a token behind those that are there ends the answer."""
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.STOP
        if len(self.token_ids) + 1 >= self.max_length:
            return FinishReason.LENGTH
        return None

    def stamp(self, kind: LifetimeEventKind, transfer: KvTransfer | None = None) -> None:
        """Notes an event, now."""
        self.events.append(LifetimeEvent(kind, time.time_ns(), transfer=transfer))

    def tell(
        self,
        sample: TokenLogprob | None = None,
        finish_reason: FinishReason | None = None,
        error: SplitserveError | None = None,
        index: int | None = None,
    ) -> "Progress":
        """News of an answer, its first unless told otherwise, with every event since the last."""
        events, self.events = self.events, []
        index = self.indexes[0] if index is None else index
        progress = Progress(
            self.ticket, events=events, finish_reason=finish_reason, error=error, index=index
        )
        if sample is not None:
            progress.token_ids.append(sample.token_id)
            if self.sampling.logprobs is not None:
                progress.logprobs.append(sample)
        return progress


@dataclass(slots=True)
class Progress:
    """News of one answer from its node.

    Attributes:
        ticket: Whose, by the attempt's ticket.
        token_ids: Tokens sampled.
        logprobs: One per token, if asked for.
        events: On the node's clock.
        finish_reason: Set: the answer is complete and the node holds nothing of it.
        error: Set: all of the ticket failed here and the node holds nothing of it.
        index: Which of its answers.
        cached_tokens: Prompt tokens that a prefill node had not to compute, with its first token.
    """

    ticket: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    events: list[LifetimeEvent] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: SplitserveError | None = None
    index: int = 0
    cached_tokens: int = 0
