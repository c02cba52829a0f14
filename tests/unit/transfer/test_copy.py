"""The native copy and numpy's do the same."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve import native
from splitserve.transfer.copy import copy_planned
from splitserve.transfer.plan import Region, Run, TransferPlan

pytestmark = pytest.mark.skipif(not native.available, reason="the kernels are not built")


@st.composite
def copies(draw: st.DrawFn):
    """Two caches of unequal shape, and a plan of one region between them."""

    def side():
        layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        return [draw(st.integers(1, 5)), layers, 2, heads, draw(st.sampled_from([1, 3, 16, 32]))]

    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    head_dim = draw(st.sampled_from([1, 3, 16, 64, 80]))
    shapes = [[*side(), head_dim] for _ in range(2)]
    # Memory that begins anywhere: what is copied need not be aligned.
    caches = []
    for number, shape in enumerate(shapes):
        size, skip = int(np.prod(shape)), draw(st.integers(0, 17))
        values = np.arange(size + skip) * (7 + number) + number
        caches.append(values.astype(dtype)[skip:].reshape(shape))
    given, taken = shapes

    def part(axis):
        count = draw(st.integers(1, min(given[axis], taken[axis])))
        return (
            draw(st.integers(0, given[axis] - count)),
            draw(st.integers(0, taken[axis] - count)),
            count,
        )

    (from_layer, to_layer, layers), (from_head, to_head, heads) = part(1), part(3)
    region = Region(0, from_layer, from_head, to_layer, to_head, layers, heads)
    runs = []
    for _ in range(draw(st.integers(0, 3))):
        (from_block, to_block, blocks), (from_token, to_token, tokens) = part(0), part(4)
        runs.append(Run(from_block, from_token, to_block, to_token, tokens, blocks))
    return TransferPlan((region,), tuple(runs)), caches


@settings(deadline=None)
@given(copies())
def test_native_and_numpy_copies_agree(case):
    plan, (source, target) = case
    expected = target.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", False)
        size_bytes = copy_planned(plan, {0: source}, expected)
    source.flags.writeable = False
    assert copy_planned(plan, {0: source}, target) == size_bytes
    np.testing.assert_array_equal(target, expected)


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 16, 17, 32])),
    blocks=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 4)),
    skips=st.tuples(st.integers(0, 65), st.integers(0, 65)),
)
def test_whole_blocks_of_equal_layouts_are_copied_and_nothing_else(shape, blocks, skips):
    (layers, heads, block_size), (from_block, to_block, count) = shape, blocks
    whole = (6, layers, 2, heads, block_size, 80)
    size = int(np.prod(whole))
    source, target = (
        (np.arange(size + skip) * 7 + number).astype(np.uint16)[skip:].reshape(whole)
        for number, skip in enumerate(skips)
    )
    expected = target.copy()
    expected[to_block : to_block + count] = source[from_block : from_block + count]
    region = Region(0, 0, 0, 0, 0, layers, heads)
    run = Run(from_block, 0, to_block, 0, block_size, count)
    assert copy_planned(TransferPlan((region,), (run,)), {0: source}, target) == (
        2 * size // 6 * count
    )
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    ("part", "run"),
    [
        ((0, 0, 0, 0, 3, 1), (0, 0, 0, 0, 1, 1)),
        ((0, 0, 0, 1, 2, 2), (0, 0, 0, 0, 1, 1)),
        ((-1, 0, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1)),
        ((0, 0, 0, 0, 2, 2), (4, 0, 0, 0, 1, 1)),
        ((0, 0, 0, 0, 2, 2), (0, 0, 3, 0, 1, 2)),
        ((0, 0, 0, 0, 2, 2), (0, 7, 0, 0, 2, 1)),
        ((0, 0, 0, 0, 2, 2), (0, 0, 0, -1, 1, 1)),
        ((0, 0, 0, 0, 2, 2), (0, 0, 0, 0, 1, 2**62)),
    ],
)
def test_what_lies_outside_a_cache_is_never_touched(part, run):
    cache = torch.zeros(4, 2, 2, 2, 8, 16)
    with pytest.raises(RuntimeError, match="must lie within both caches"):
        native.ops.copy_runs(cache, cache.clone(), part, torch.tensor([run]))
