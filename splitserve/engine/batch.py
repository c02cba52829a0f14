"""What one step computes, and what it produced: plain data between a node and its workers."""

from dataclasses import dataclass

from splitserve.core.request import Request, TokenLogprob
from splitserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample a row's next token.

    Attributes:
        params: The client's wishes, the seed set.
        position: Index the new token will have in prompt + answer; the sampler draws once for it.
        prompt_ids: The prompt, only when penalties need it.
        output_ids: The answer so far, only when penalties need it.
    """

    params: SamplingParams
    position: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request) -> "SampleSpec":
        """How to sample the token behind all of the request's tokens."""
        params, position = request.sampling, len(request.token_ids)
        if not params.has_penalties:
            return cls(params, position)
        prompt = tuple(request.token_ids[: request.prompt_length])
        return cls(params, position, prompt, tuple(request.token_ids[request.prompt_length :]))


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a step.

    Attributes:
        ticket: Whose, by the attempt's ticket.
        token_ids: Tokens to compute: a chunk of the prompt, or the last token.
        start: Position of the first of them; KV of all earlier ones is in the cache by then.
        block_ids: Enough blocks for ``start + len(token_ids)`` tokens, in token order.
        sample: None for a chunk that does not end the prompt.
    """

    ticket: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sample: SampleSpec | None

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
        sample = SampleSpec.of(request) if end == len(request.token_ids) else None
        return cls(request.ticket, tokens, start, tuple(request.block_ids), sample)


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
        samples: One per row of the batch, None where nothing was sampled. ``logprob`` is filled
            only if the row's params ask for log-probabilities.
    """

    samples: tuple[TokenLogprob | None, ...]
