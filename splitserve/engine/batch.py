"""What one step computes, and what it produced: plain data between a node and its workers."""

from dataclasses import dataclass

from splitserve.core.request import TokenLogprob
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


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a step.

    Attributes:
        request_id: Whose.
        token_ids: Tokens to compute: a chunk of the prompt, or the last token.
        start: Position of the first of them; KV of all earlier ones is in the cache.
        block_ids: Enough blocks for ``start + len(token_ids)`` tokens, in token order.
        sample: None for a chunk that does not end the prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    sample: SampleSpec | None


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
