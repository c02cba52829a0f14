"""Which rectangle (layers x heads x tokens) of which source rank goes to which target rank.

Layouts need not agree: every target rank intersects its own rectangle of layers and heads with
every source rank's, and token runs bridge unequal block sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from splitserve.core.errors import FailedPreconditionError
from splitserve.kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Region:
    """Layers and heads that one source rank gives, in both ranks' own counting.

    Attributes:
        source_rank: Who gives.
        source_layer: Its first layer.
        source_head: Its first head.
        target_layer: Where the first layer goes.
        target_head: Where the first head goes.
        layers: How many layers.
        heads: How many heads.
    """

    source_rank: int
    source_layer: int
    source_head: int
    target_layer: int
    target_head: int
    layers: int
    heads: int


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that lie in a row in both caches.

    Either some tokens within one block, or whole blocks that follow each other on both sides.

    Attributes:
        source_block: First block at the source.
        source_offset: Place of the first token in it.
        target_block: First block at the target.
        target_offset: Place of the first token in it.
        tokens: Tokens in each block.
        blocks: How many blocks; more than one only of whole ones.
    """

    source_block: int
    source_offset: int
    target_block: int
    target_offset: int
    tokens: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What one target rank copies: every region of every run.

    Attributes:
        regions: Together the target's rectangle, without overlap.
        runs: Together the tokens, in order.
    """

    regions: tuple[Region, ...]
    runs: tuple[Run, ...]


def plan_transfer(
    sources: Sequence[KVLayout],
    target: KVLayout,
    source_block_ids: Sequence[int],
    target_block_ids: Sequence[int],
    num_tokens: int,
    *,
    first_token: int = 0,
    spread: int = 0,
) -> TransferPlan:
    """Plans the copy of a sequence's tokens, and of nothing behind them.

    Args:
        sources: What each source rank holds.
        target: What the target rank holds.
        source_block_ids: The sequence's blocks at the source, in token order.
        target_block_ids: The same at the target; blocks pair up by position alone.
        num_tokens: How many tokens the sequence has.
        first_token: Which of them is the first to copy.
        spread: Any number; target ranks with different ones read replicated heads from
            different sources.

    Raises:
        FailedPreconditionError: The two sides are not the same model in the same dtype, the
            sources don't cover the target, or the blocks don't hold the tokens.
    """
    _check_same_model(sources, target)
    source_size = sources[0].block_size
    for side, ids, size in (
        ("source", source_block_ids, source_size),
        ("target", target_block_ids, target.block_size),
    ):
        if len(ids) * size < num_tokens:
            raise FailedPreconditionError(
                f"block_ids: the {side}'s {len(ids)} blocks of {size} tokens "
                f"do not hold {num_tokens}"
            )
    return TransferPlan(
        _regions(sources, target, spread),
        _runs(
            source_block_ids,
            source_size,
            target_block_ids,
            target.block_size,
            range(first_token, num_tokens),
        ),
    )


def _check_same_model(sources: Sequence[KVLayout], target: KVLayout) -> None:
    if not sources:
        raise FailedPreconditionError("ranks: the source has none")
    for source in sources:
        for field in ("num_layers", "num_kv_heads", "head_dim", "dtype"):
            theirs, ours = getattr(source, field), getattr(target, field)
            if theirs != ours:
                raise FailedPreconditionError(
                    f"{field}: the source's KV has {theirs}, the target's {ours}"
                )
        if source.block_size != sources[0].block_size:
            raise FailedPreconditionError(
                f"block_size: the source's ranks have {sources[0].block_size} "
                f"and {source.block_size}"
            )


def _regions(sources: Sequence[KVLayout], target: KVLayout, spread: int) -> tuple[Region, ...]:
    """Cuts the target's rectangle where any source begins or ends and gives each cell a source."""
    layer_cuts = _cuts(
        target.layer_begin, target.layer_end, [(s.layer_begin, s.layer_end) for s in sources]
    )
    head_cuts = _cuts(
        target.head_begin, target.head_end, [(s.head_begin, s.head_end) for s in sources]
    )
    # Sources that hold the same cells take turns, so that cells of one source stay together.
    turns: dict[tuple[int, ...], int] = {}
    regions: list[Region] = []
    for layers in pairwise(layer_cuts):
        for heads in pairwise(head_cuts):
            holders = tuple(
                rank for rank, source in enumerate(sources) if _holds(source, layers, heads)
            )
            if not holders:
                raise FailedPreconditionError(
                    f"ranks: no source holds layers {layers[0]}..{layers[1]} "
                    f"of KV heads {heads[0]}..{heads[1]}"
                )
            turn = turns.setdefault(holders, spread + len(turns))
            rank = holders[turn % len(holders)]
            _extend(regions, _region(rank, sources[rank], target, layers, heads))
    return _join_layers(regions)


def _cuts(begin: int, end: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    inner = {edge for pair in ranges for edge in pair if begin < edge < end}
    return sorted({begin, end} | inner)


def _holds(source: KVLayout, layers: tuple[int, int], heads: tuple[int, int]) -> bool:
    return (
        source.layer_begin <= layers[0]
        and layers[1] <= source.layer_end
        and source.head_begin <= heads[0]
        and heads[1] <= source.head_end
    )


def _region(
    rank: int,
    source: KVLayout,
    target: KVLayout,
    layers: tuple[int, int],
    heads: tuple[int, int],
) -> Region:
    return Region(
        source_rank=rank,
        source_layer=layers[0] - source.layer_begin,
        source_head=heads[0] - source.head_begin,
        target_layer=layers[0] - target.layer_begin,
        target_head=heads[0] - target.head_begin,
        layers=layers[1] - layers[0],
        heads=heads[1] - heads[0],
    )


def _extend(regions: list[Region], region: Region) -> None:
    """Appends a region, or joins it to the last one if it goes on to the right of it."""
    if regions:
        last = regions[-1]
        if region == replace(
            last,
            source_head=last.source_head + last.heads,
            target_head=last.target_head + last.heads,
            heads=region.heads,
        ):
            regions[-1] = replace(last, heads=last.heads + region.heads)
            return
    regions.append(region)


def _join_layers(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Joins regions that go on below one another."""
    joined: dict[tuple[int, int, int], Region] = {}
    done: list[Region] = []
    for region in regions:
        key = (region.source_rank, region.target_head, region.heads)
        above = joined.get(key)
        if above is not None and region == replace(
            above,
            source_layer=above.source_layer + above.layers,
            target_layer=above.target_layer + above.layers,
            layers=region.layers,
        ):
            joined[key] = replace(above, layers=above.layers + region.layers)
            continue
        if above is not None:
            done.append(above)
        joined[key] = region
    return (*done, *joined.values())


def _runs(
    source_ids: Sequence[int],
    source_size: int,
    target_ids: Sequence[int],
    target_size: int,
    wanted: range,
) -> tuple[Run, ...]:
    runs: list[Run] = []
    for run in _pieces(source_ids, source_size, target_ids, target_size, wanted):
        last = runs[-1] if runs else None
        whole = run.tokens == source_size == target_size
        if (
            last is not None
            and whole
            and last.tokens == run.tokens
            and run.source_block == last.source_block + last.blocks
            and run.target_block == last.target_block + last.blocks
        ):
            runs[-1] = replace(last, blocks=last.blocks + 1)
        else:
            runs.append(run)
    return tuple(runs)


def _pieces(
    source_ids: Sequence[int],
    source_size: int,
    target_ids: Sequence[int],
    target_size: int,
    wanted: range,
) -> Iterator[Run]:
    """The longest runs of tokens that cross no block's end on either side."""
    token = wanted.start
    while token < wanted.stop:
        source_index, source_offset = divmod(token, source_size)
        target_index, target_offset = divmod(token, target_size)
        tokens = min(source_size - source_offset, target_size - target_offset, wanted.stop - token)
        yield Run(
            source_ids[source_index],
            source_offset,
            target_ids[target_index],
            target_offset,
            tokens,
        )
        token += tokens
