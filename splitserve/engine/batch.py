"""What one step computes, and what it produced: plain data between a node and its workers."""

from dataclasses import dataclass

from splitserve.core.request import Request, RequestKey, TokenLogprob
from splitserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample the next token of one answer.

    Attributes:
        params: The client's wishes, the seed set.
        position: Index the new token will have in prompt + answer; the sampler draws once for it.
        prompt_ids: The prompt, only when penalties need it.
        output_ids: The answer so far, only when penalties need it.
        index: Which of a request's answers; each has its own draw.
    """

    params: SamplingParams
    position: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    index: int = 0

    @classmethod
    def of(cls, request: Request) -> tuple["SampleSpec", ...]:
        """How to sample the token behind all of the request's tokens, for each of its answers."""
        params, position = request.sampling, len(request.token_ids)
        prompt: tuple[int, ...] = ()
        output: tuple[int, ...] = ()
        if params.has_penalties:
            prompt = tuple(request.token_ids[: request.prompt_length])
            output = tuple(request.token_ids[request.prompt_length :])
        return tuple(cls(params, position, prompt, output, index) for index in request.indexes)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a step.

    Attributes:
        key: Whose.
        token_ids: Tokens to compute: a chunk of the prompt, or the last token.
        start: Position of the first of them; KV of all earlier ones is in the cache by then.
        block_ids: Enough blocks for ``start + len(token_ids)`` tokens, in token order.
        samples: One for each token to sample behind them; none if they do not end the prompt.
    """

    key: RequestKey
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    samples: tuple[SampleSpec, ...]

    @classmethod
    def of(cls, request: Request, count: int, ahead: int = 0) -> "BatchRow":
        """The request's next ``count`` tokens; samples if they are its last.

        Args:
            request: Whose.
            count: How many.
            ahead: Tokens that steps under way compute before these.
        """
        start = request.computed + ahead
        end = start + count
        tokens = tuple(request.token_ids[start:end])
        samples = SampleSpec.of(request) if end == len(request.token_ids) else ()
        return cls(request.key, tokens, start, tuple(request.block_ids), samples)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes; no request appears twice."""

    rows: tuple[BatchRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced.

    Attributes:
        samples: For each row of the batch, one per its `BatchRow.samples`. ``logprob`` is filled
            only if the row's params ask for log-probabilities.
    """

    samples: tuple[tuple[TokenLogprob, ...], ...]
