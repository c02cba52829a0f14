"""What one step computes, and what it produced: plain data between a node and its workers.

Every step of many requests is pickled, so both pack themselves: an object for each token would
cost more than a small model's step.
"""

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from splitserve.core.request import Request, RequestKey, TokenLogprob
from splitserve.core.sampling import SamplingParams

MAX_PACKED_PARAMS = 4096
"""Sampling parameters kept packed, and unpacked at the other end; requests keep theirs for life."""

_NUMBERS = "I"
"""Array type of token ids, positions and blocks: 32 bits without a sign."""


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
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
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

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self.rows
        sizes = [(r.start, len(r.token_ids), len(r.block_ids), len(r.samples)) for r in rows]
        return _unpacked_batch, (
            [row.key for row in rows],
            array(_NUMBERS, chain.from_iterable(sizes)),
            array(_NUMBERS, chain.from_iterable(row.token_ids for row in rows)),
            array(_NUMBERS, chain.from_iterable(row.block_ids for row in rows)),
            [_packed_spec(spec) for row in rows for spec in row.samples],
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced.

    Attributes:
        samples: For each row of the batch, one per its `BatchRow.samples`. ``logprob`` is filled
            only if the row's params ask for log-probabilities.
    """

    samples: tuple[tuple[TokenLogprob, ...], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        flat = list(chain.from_iterable(self.samples))
        return _unpacked_output, (
            array(_NUMBERS, map(len, self.samples)),
            array(_NUMBERS, [sample.token_id for sample in flat]),
            {i: (one.logprob, one.top) for i, one in enumerate(flat) if one.logprob or one.top},
        )


def _unpacked_batch(
    keys: list[RequestKey],
    sizes: "array[int]",
    token_ids: "array[int]",
    block_ids: "array[int]",
    packed_specs: list[tuple[Any, ...]],
) -> Batch:
    rows = []
    token = block = 0
    specs = map(_unpacked_spec, packed_specs)
    numbers = iter(sizes)
    for key, start, tokens, blocks, samples in zip(
        keys, numbers, numbers, numbers, numbers, strict=True
    ):
        rows.append(
            BatchRow(
                key,
                token_ids[token : token + tokens],
                start,
                block_ids[block : block + blocks],
                tuple([next(specs) for _ in range(samples)]),
            )
        )
        token += tokens
        block += blocks
    return Batch(tuple(rows))


def _unpacked_output(
    counts: "array[int]",
    token_ids: "array[int]",
    logprobs: dict[int, tuple[float, tuple[tuple[int, float], ...]]],
) -> StepOutput:
    flat = [TokenLogprob(token_id, 0.0) for token_id in token_ids]
    for index, (logprob, top) in logprobs.items():
        flat[index] = TokenLogprob(flat[index].token_id, logprob, top)
    samples = iter(flat)
    return StepOutput(tuple([tuple([next(samples) for _ in range(count)]) for count in counts]))


def _packed_spec(spec: SampleSpec) -> tuple[Any, ...]:
    return (
        _packed_params(spec.params), spec.position, spec.prompt_ids, spec.output_ids, spec.index
    )  # fmt: skip


def _unpacked_spec(packed: tuple[Any, ...]) -> SampleSpec:
    return SampleSpec(_unpacked_params(packed[0]), *packed[1:])


@lru_cache(MAX_PACKED_PARAMS)
def _packed_params(params: SamplingParams) -> bytes:
    return pickle.dumps(params, protocol=pickle.HIGHEST_PROTOCOL)


@lru_cache(MAX_PACKED_PARAMS)
def _unpacked_params(packed: bytes) -> SamplingParams:
    params: SamplingParams = pickle.loads(packed)
    return params
