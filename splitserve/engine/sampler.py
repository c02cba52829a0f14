"""From logits to tokens: a pure function of (logits, params, seed, position).

Each position of an answer has one number drawn for it, by a counter-based generator (Philox,
Salmon et al., 2011): a request gets the same tokens whoever shares its batch, and one that goes
on elsewhere goes on as if nothing had happened. The draw walks the tokens in the order of their
ids, not of their probabilities: two that nearly tie may swap ranks between batch sizes, and that
must not choose another token.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitserve import native
from splitserve.core.errors import InternalError
from splitserve.core.request import TokenLogprob
from splitserve.core.sampling import MAX_SEED, SamplingParams
from splitserve.engine.batch import SampleSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_TINY = float(np.finfo(np.float32).tiny)
_CHUNK = 256
_NUCLEUS_FLOOR = 1e-3  # of the likeliest token's weight
_MAX = float(np.finfo(np.float32).max)


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[TokenLogprob]:
    """Samples each row's next token.

    Args:
        logits: float32 ``[R, V]``; left as it is.
        specs: How to sample, one per row.

    Returns:
        One per row; log-probabilities are those of the unmodified logits, and there only where
        the row's params ask for them.

    Raises:
        InternalError: A row's logits are not finite; the model computed nonsense.
    """
    assert logits.shape[0] == len(specs), "one spec per row"
    if not specs:
        return []
    # numpy's argmax is vectorised, torch's along rows is not: 20 times slower on a CPU.
    rows: Floats = logits.numpy()
    likeliest = rows.argmax(axis=-1)
    # A NaN is its row's argmax.
    if not np.isfinite(rows[np.arange(len(rows)), likeliest]).all():
        raise InternalError("logits: not finite; the weights or the KV cache are broken")
    tokens: list[int] = likeliest.tolist()
    plain: list[int] = []
    for index, spec in enumerate(specs):
        if spec.params.greedy and not spec.params.has_penalties:
            continue
        if spec.params.has_penalties or spec.params.filters:
            tokens[index] = _choose(rows[index], tokens[index], spec)
        else:
            plain.append(index)
    if plain:
        best = rows[plain, likeliest[plain]]
        sums = _chunk_sums(logits, plain, best, [specs[index] for index in plain])
        for index, top, chunks in zip(plain, best, sums, strict=True):
            tokens[index] = _draw(rows[index], top, chunks, specs[index])
    return [
        _with_logprobs(token, row, spec.params)
        for token, row, spec in zip(tokens, rows, specs, strict=True)
    ]


def _choose(row: Floats, likeliest: int, spec: SampleSpec) -> int:
    """The next token where not all logits count as they are."""
    if spec.params.has_penalties:
        row = _penalised(row, spec)
        likeliest = int(row.argmax())
    if spec.params.greedy:
        return likeliest
    weights = _weights(row, row[likeliest], spec.params)
    kept = _filtered(weights, spec.params)
    if kept is not None:
        weights = weights[kept]
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _CHUNK), dtype=np.float64)
    chunk, rest = _walk(sums, uniform(spec) * float(sums.sum()))
    index = chunk * _CHUNK + _walk(weights[chunk * _CHUNK : (chunk + 1) * _CHUNK], rest)[0]
    return index if kept is None else int(kept[index])


def _draw(row: Floats, best: np.float32, sums: Floats, spec: SampleSpec) -> int:
    """The next token where all count; the weights of only one chunk are looked at one by one."""
    chunk, rest = _walk(sums, uniform(spec) * float(sums.sum(dtype=np.float64)))
    part = row[chunk * _CHUNK : (chunk + 1) * _CHUNK]
    return chunk * _CHUNK + _walk(_weights(part, best, spec.params), rest)[0]


def _chunk_sums(
    logits: Tensor, rows: list[int], best: Floats, specs: Sequence[SampleSpec]
) -> Floats:
    """Sums of the weights of each chunk of some rows: ``[rows, chunks]``."""
    if native.available:
        scales = [1.0 / max(spec.params.temperature, _TINY) for spec in specs]
        sums: Tensor = native.ops.weight_sums(
            logits, torch.tensor(rows), torch.from_numpy(best), torch.tensor(scales), _CHUNK
        )
        return sums.numpy()
    begins = np.arange(0, logits.shape[1], _CHUNK)
    return np.stack(
        [
            np.add.reduceat(_weights(row, top, spec.params), begins)
            for row, top, spec in zip(logits[rows].numpy(), best, specs, strict=True)
        ]
    )


def _weights(logits: Floats, best: np.float32, params: SamplingParams) -> Floats:
    """How likely tokens are, the best one's weight being one."""
    # Shifted first, so that no temperature overflows.
    weights = logits - best
    with np.errstate(over="ignore"):
        weights /= np.float32(max(params.temperature, _TINY))
    np.exp(weights, out=weights)
    return weights


def uniform(spec: SampleSpec) -> float:
    """The number in [0, 1) of this seed, answer and position."""
    assert spec.params.seed is not None, "the router sets the seed"
    seed = (spec.params.seed + spec.index) % (MAX_SEED + 1)
    word = int(np.random.Philox(key=seed, counter=spec.position).random_raw())
    return (word >> 11) * 2.0**-53


def _walk(weights: Floats, threshold: float) -> tuple[int, float]:
    """Index at which the running total passes a threshold, and how far into that weight it lies.

    Chunk sums first, then the tokens of one chunk: a running total over the whole vocabulary
    takes six times as long.
    """
    totals = np.cumsum(weights, dtype=np.float64)
    # Rounding may lift the threshold to the last total, which nothing would be above.
    below = min(threshold, math.nextafter(totals[-1], 0.0))
    # What has no weight is never passed.
    index = int(np.searchsorted(totals, below, side="right"))
    return index, below - (float(totals[index - 1]) if index else 0.0)


def _penalised(row: Floats, spec: SampleSpec) -> Floats:
    params, row = spec.params, row.copy()
    generated, counts = np.unique(np.asarray(spec.output_ids, dtype=np.intp), return_counts=True)
    # Extreme penalties may overflow; they end at the largest number and not at a NaN.
    with np.errstate(over="ignore"):
        if params.repetition_penalty != 1.0:
            seen = np.union1d(np.asarray(spec.prompt_ids, dtype=np.intp), generated)
            factor = np.float32(max(params.repetition_penalty, _TINY))
            row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        row[generated] -= params.frequency_penalty * counts + params.presence_penalty
    return np.clip(row, -_MAX, _MAX)


def _filtered(weights: Floats, params: SamplingParams) -> Ids | None:
    """Ids that the filters keep, ascending, or None for all: min_p, then top_k, then top_p."""
    kept: Ids | None = None
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
    if 0 < params.top_k < (len(weights) if kept is None else len(kept)):
        kept = _select(_top_k, weights, kept, params.top_k)
    if params.top_p < 1.0:
        kept = _select(_top_p, weights, kept, params.top_p)
    return kept


def _select(rule: Any, weights: Floats, kept: Ids | None, limit: float) -> Ids:
    if kept is None:
        return rule(weights, limit)  # type: ignore[no-any-return]
    return kept[rule(weights[kept], limit)]  # type: ignore[no-any-return]


def _top_k(weights: Floats, k: int) -> Ids:
    """The k heaviest, ascending by id; of equal ones those of lower id."""
    threshold = np.partition(weights, len(weights) - k)[len(weights) - k]
    heavier = np.flatnonzero(weights > threshold)
    equal = np.flatnonzero(weights == threshold)[: k - len(heavier)]
    return np.sort(np.concatenate([heavier, equal]))


def _top_p(weights: Floats, p: float) -> Ids:
    """The fewest tokens whose share reaches p, heaviest first; ascending by id."""
    wanted = p * weights.sum(dtype=np.float64)
    # Tokens above any weight hold the nucleus if together they reach p: mostly a sort of a few
    # hundred. All those below the second bound weigh less than 1 - p together, halved to be safe
    # from rounding.
    for bound in (_NUCLEUS_FLOOR, (1.0 - p) * wanted / (2 * len(weights))):
        candidates = np.flatnonzero(weights > bound)
        if weights[candidates].sum(dtype=np.float64) >= wanted:
            break
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    shares = np.cumsum(weights[order], dtype=np.float64)
    count = int(np.searchsorted(shares, wanted, side="left")) + 1
    return np.sort(order[:count])


def _with_logprobs(token_id: int, row: Floats, params: SamplingParams) -> TokenLogprob:
    if params.logprobs is None:
        return TokenLogprob(token_id, 0.0)
    best = float(row.max())
    log_total = best + math.log(np.exp(row - best).sum(dtype=np.float64))
    top: list[int] = []
    if params.logprobs:
        likely = _top_k(row, min(params.logprobs, len(row)))
        top = likely[np.argsort(-row[likely], kind="stable")].tolist()
    return TokenLogprob(
        token_id,
        float(row[token_id]) - log_total,
        tuple((token, float(row[token]) - log_total) for token in top),
    )
