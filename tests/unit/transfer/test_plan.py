from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.errors import FailedPreconditionError
from splitserve.kv.layout import KVLayout
from splitserve.transfer.copy import copy_planned
from splitserve.transfer.plan import Region, Run, plan_transfer

HEAD_DIM = 2


def layout(
    layers: int,
    heads: int,
    block_size: int = 16,
    layer_range: tuple[int, int] | None = None,
    head_range: tuple[int, int] | None = None,
) -> KVLayout:
    layer_begin, layer_end = layer_range or (0, layers)
    head_begin, head_end = head_range or (0, heads)
    return KVLayout(
        layers, heads, HEAD_DIM, block_size, "float32", layer_begin, layer_end, head_begin, head_end
    )


def split(total: int, parts: int) -> list[tuple[int, int]]:
    edges = [total * part // parts for part in range(parts + 1)]
    return list(pairwise(edges))


def head_ranges(heads: int, tensor: int) -> list[tuple[int, int]]:
    """Heads by tensor rank; with more ranks than heads, each head is on several."""
    if tensor <= heads:
        return split(heads, tensor)
    return [(rank * heads // tensor, rank * heads // tensor + 1) for rank in range(tensor)]


def node(layers: int, heads: int, block_size: int, pipeline: int, tensor: int) -> list[KVLayout]:
    return [
        layout(layers, heads, block_size, layer_range, head_range)
        for layer_range, head_range in product(split(layers, pipeline), head_ranges(heads, tensor))
    ]


@dataclass
class Sequence:
    """One sequence's blocks at a node; `truth` says what each element of it holds."""

    layouts: list[KVLayout]
    block_ids: list[int]
    num_blocks: int

    def caches(self, truth: np.ndarray | None, first_token: int = 0) -> list[np.ndarray]:
        """Each rank's cache; with the sequence in its blocks, and elsewhere -1."""
        caches = []
        for rank in self.layouts:
            cache = np.full((self.num_blocks, *rank.block_shape), -1, np.int64)
            if truth is not None:
                for token in range(first_token, truth.shape[0]):
                    block = self.block_ids[token // rank.block_size]
                    part = truth[
                        token,
                        rank.layer_begin : rank.layer_end,
                        :,
                        rank.head_begin : rank.head_end,
                    ]
                    cache[block, :, :, :, token % rank.block_size] = part
            caches.append(cache)
        return caches


@st.composite
def pairs(draw) -> tuple[Sequence, Sequence, int]:
    layers = draw(st.integers(1, 64))
    heads = draw(st.integers(1, 32))
    num_tokens = draw(st.integers(0, 70))
    sides = []
    # Half of all pairs have equal blocks, and small ones, so that runs of blocks come up often.
    equal = draw(st.one_of(st.none(), st.integers(1, 16)))
    for _ in range(2):
        block_size = equal or draw(st.integers(1, 64))
        pipeline = draw(st.integers(1, min(8, layers)))
        layouts = node(layers, heads, block_size, pipeline, draw(st.integers(1, 8)))
        needed = layouts[0].blocks_for(num_tokens)
        num_blocks = needed + 2
        blocks = range(num_blocks)
        ids = draw(st.one_of(st.just(list(blocks)), st.permutations(blocks)))
        ids = ids[: needed + draw(st.integers(0, 2))]
        sides.append(Sequence(layouts, ids, num_blocks))
    return sides[0], sides[1], num_tokens


@settings(max_examples=150, deadline=None)
@given(pairs(), st.integers(0, 3), st.data())
def test_any_layout_pulls_any_other_and_each_element_exactly_once(pair, spread, data):
    source, target, num_tokens = pair
    # Where the target has the beginning already, it pulls only what it lacks.
    first_token = data.draw(st.one_of(st.just(0), st.integers(0, num_tokens)))
    model = source.layouts[0]
    truth = np.arange(num_tokens * model.num_layers * 2 * model.num_kv_heads * HEAD_DIM).reshape(
        num_tokens, model.num_layers, 2, model.num_kv_heads, HEAD_DIM
    )
    given_caches = dict(enumerate(source.caches(truth)))
    expected = target.caches(truth, first_token)
    for rank, wanted in zip(target.layouts, expected, strict=True):
        plan = plan_transfer(
            source.layouts,
            rank,
            source.block_ids,
            target.block_ids,
            num_tokens,
            first_token=first_token,
            spread=spread,
        )
        got = np.full_like(wanted, -1)
        size_bytes = copy_planned(plan, given_caches, got)
        # Equal to a direct copy, and nothing else touched; with as many bytes as there are
        # elements, none was copied twice.
        np.testing.assert_array_equal(got, wanted)
        assert (
            size_bytes == 8 * (num_tokens - first_token) * rank.layers * 2 * rank.heads * HEAD_DIM
        )


def test_a_run_that_begins_within_a_block_does_not_go_on_with_the_next():
    whole = layout(1, 1, block_size=4)
    plan = plan_transfer([whole], whole, [0, 1, 2], [0, 1, 2], 12, first_token=1)
    assert plan.runs == (Run(0, 1, 0, 1, 3), Run(1, 0, 1, 0, 4, blocks=2))


def test_blocks_pair_by_position_not_by_id_or_arrival():
    whole = layout(1, 1, block_size=4)
    plan = plan_transfer([whole], whole, [7, 2, 5], [1, 9, 0], 10)
    assert [(run.source_block, run.target_block, run.tokens) for run in plan.runs] == [
        (7, 1, 4),
        (2, 9, 4),
        (5, 0, 2),
    ]


def test_equal_layouts_copy_whole_blocks_and_join_neighbours():
    whole = layout(30, 3)
    plan = plan_transfer([whole], whole, [4, 5, 6, 9, 8, 7], [0, 1, 2, 3, 4, 5], 96)
    assert plan.regions == (Region(0, 0, 0, 0, 0, 30, 3),)
    assert plan.runs == (
        Run(4, 0, 0, 0, 16, blocks=3),
        Run(9, 0, 3, 0, 16),
        Run(8, 0, 4, 0, 16),
        Run(7, 0, 5, 0, 16),
    )


@given(
    pipeline=st.integers(1, 8),
    tensor=st.integers(1, 8),
    heads=st.sampled_from([1, 2, 8]),
    block_ids=st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True),
)
def test_equal_layouts_take_at_most_one_copy_for_each_block_and_rank(
    pipeline, tensor, heads, block_ids
):
    ranks = node(8, heads, 16, pipeline, tensor)
    for number, rank in enumerate(ranks):
        plan = plan_transfer(ranks, rank, block_ids, block_ids, 16 * len(block_ids), spread=number)
        assert [(region.layers, region.heads) for region in plan.regions] == [
            (rank.layers, rank.heads)
        ]
        assert {run.tokens for run in plan.runs} == {16}
        assert sum(run.blocks for run in plan.runs) == len(block_ids)


def test_nothing_behind_the_last_token_is_copied():
    whole = layout(2, 2)
    plan = plan_transfer([whole], whole, [0, 1, 2], [3, 4, 5], 33)
    assert plan.runs == (Run(0, 0, 3, 0, 16, blocks=2), Run(2, 0, 5, 0, 1))
    assert plan_transfer([whole], whole, [0], [0], 0).runs == ()


def test_each_rank_reads_only_the_ranks_that_hold_its_part():
    sources = node(8, 8, 16, pipeline=2, tensor=2)
    target = layout(8, 8, layer_range=(4, 8), head_range=(2, 6))
    plan = plan_transfer(sources, target, [0], [0], 16)
    assert plan.regions == (Region(2, 0, 2, 0, 0, 4, 2), Region(3, 0, 0, 0, 2, 4, 2))


def test_parts_that_lie_together_on_both_sides_are_one_region():
    # Cut by the other sources' edges, but all of it is rank 0's.
    sources = [layout(4, 4), layout(4, 4, layer_range=(1, 2), head_range=(1, 2))]
    plan = plan_transfer(sources[:1], layout(4, 4), [0], [0], 16)
    assert plan.regions == (Region(0, 0, 0, 0, 0, 4, 4),)


def test_replicated_heads_are_read_from_one_source_each_and_from_all_in_turn():
    sources = node(4, 2, 16, pipeline=1, tensor=8)
    used = [
        [region.source_rank for region in plan_transfer(
            sources, rank, [0], [0], 16, spread=number
        ).regions]
        for number, rank in enumerate(node(4, 2, 16, pipeline=1, tensor=8))
    ]  # fmt: skip
    assert sorted(rank for ranks in used for rank in ranks) == list(range(8))
    whole = plan_transfer(sources, layout(4, 2), [0], [0], 16)
    assert [region.heads for region in whole.regions] == [1, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 9), ("num_kv_heads", 9), ("head_dim", 4), ("dtype", "bfloat16")],
)
def test_another_model_is_refused_by_name_of_what_differs(field, value):
    target = layout(8, 8)
    with pytest.raises(FailedPreconditionError, match=field):
        plan_transfer([replace(target, **{field: value})], target, [0], [0], 1)


def test_a_part_that_no_source_holds_is_refused():
    sources = node(8, 8, 16, pipeline=2, tensor=2)[:3]
    with pytest.raises(FailedPreconditionError, match=r"layers 4\.\.8 of KV heads 4\.\.8"):
        plan_transfer(sources, layout(8, 8), [0], [0], 1)
    with pytest.raises(FailedPreconditionError, match="none"):
        plan_transfer([], layout(8, 8), [0], [0], 1)


def test_source_ranks_of_unequal_block_sizes_are_refused():
    sources = node(2, 2, 16, pipeline=1, tensor=2)
    with pytest.raises(FailedPreconditionError, match="block_size"):
        plan_transfer([sources[0], replace(sources[1], block_size=8)], layout(2, 2), [0], [0], 1)


@pytest.mark.parametrize(("source_ids", "target_ids"), [([0], [0, 1]), ([0, 1], [0])])
def test_too_few_blocks_are_refused(source_ids, target_ids):
    whole = layout(2, 2)
    with pytest.raises(FailedPreconditionError, match="do not hold 17"):
        plan_transfer([whole], whole, source_ids, target_ids, 17)
