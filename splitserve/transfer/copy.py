"""Does what a plan says between caches that this process has mapped."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from splitserve import native
from splitserve.transfer.plan import Region, Run, TransferPlan


def copy_planned(plan: TransferPlan, sources: dict[int, NDArray[Any]], target: NDArray[Any]) -> int:
    """Copies what the plan says between caches of `KVCache.raw`'s shape, mostly without the GIL.

    Args:
        plan: What to copy.
        sources: Each source rank's cache, by rank.
        target: The target rank's.

    Returns:
        Bytes copied.
    """
    copy_region = _copy_past_caches if native.available else _copy_region
    for region in plan.regions:
        copy_region(region, plan.runs, sources[region.source_rank], target)
    tokens = sum(run.tokens * run.blocks for run in plan.runs)
    vectors = sum(2 * region.layers * region.heads for region in plan.regions)
    return tokens * vectors * int(target.shape[-1]) * target.itemsize


def _copy_region(
    region: Region, runs: tuple[Run, ...], source: NDArray[Any], target: NDArray[Any]
) -> None:
    """One numpy assignment per run: whole blocks are one memcpy."""
    given = source[
        :,
        region.source_layer : region.source_layer + region.layers,
        :,
        region.source_head : region.source_head + region.heads,
    ]
    taken = target[
        :,
        region.target_layer : region.target_layer + region.layers,
        :,
        region.target_head : region.target_head + region.heads,
    ]
    for run in runs:
        taken[
            run.target_block : run.target_block + run.blocks,
            ...,
            run.target_offset : run.target_offset + run.tokens,
            :,
        ] = given[
            run.source_block : run.source_block + run.blocks,
            ...,
            run.source_offset : run.source_offset + run.tokens,
            :,
        ]


def _copy_past_caches(
    region: Region, runs: tuple[Run, ...], source: NDArray[Any], target: NDArray[Any]
) -> None:
    """All runs in one call of a native kernel; see kernels/copy.cpp."""
    part = (
        *(region.source_layer, region.source_head, region.target_layer, region.target_head),
        *(region.layers, region.heads),
    )
    rows = [
        (
            *(run.source_block, run.source_offset, run.target_block, run.target_offset),
            *(run.tokens, run.blocks),
        )
        for run in runs
    ]
    # from_numpy would warn that a peer's memory cannot be written to.
    native.ops.copy_runs(
        from_dlpack(target),
        from_dlpack(source),
        part,
        torch.tensor(rows, dtype=torch.int64).view(-1, 6),
    )
