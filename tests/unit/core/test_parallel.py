"""Who holds which layers, and on which host."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splitserve.core.errors import InvalidArgumentError
from splitserve.core.parallel import ParallelConfig
from splitserve.core.placement import HostPlacement, place_aligned


def test_layers_are_shared_out_evenly_or_as_asked():
    assert ParallelConfig(1, 4).stage_layers(30) == ((0, 7), (7, 15), (15, 22), (22, 30))
    assert ParallelConfig(1, 2, (10, 20)).stage_layers(30) == ((0, 10), (10, 30))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelConfig(0), "tensor_parallel_size: 0"),
        (lambda: ParallelConfig(1, 0), "pipeline_parallel_size: 0"),
        (lambda: ParallelConfig(16, 5), "80 is not allowed.*64"),
        (lambda: ParallelConfig(1, 2, (3,)), "one number for each of the 2 stages"),
        (lambda: ParallelConfig(1, 2, (3, 0)), "at least 1 layer"),
        (lambda: ParallelConfig(1, 9).stage_layers(8), "the model has 8 layers"),
        (lambda: ParallelConfig(1, 2, (3, 4)).stage_layers(8), "3,4.*add up to the model's 8"),
    ],
)
def test_what_is_impossible_says_why(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_stages_of_equal_length_meet_at_their_least_common_multiple():
    assert place_aligned(ParallelConfig(1, 4), ParallelConfig(2, 6), 24, 8) == (
        HostPlacement((0, 12), (0, 1), (0, 1, 2, 3, 4, 5)),
        HostPlacement((12, 24), (2, 3), (6, 7, 8, 9, 10, 11)),
    )


def test_what_fits_one_host_shares_it():
    assert place_aligned(ParallelConfig(1, 2), ParallelConfig(1, 2), 8, 4) == (
        HostPlacement((0, 8), (0, 1), (0, 1)),
    )


def test_no_placement_says_what_has_to_stay_together():
    with pytest.raises(InvalidArgumentError, match=r"layers 0\.\.12 .* 2 prefill and 6 decode"):
        place_aligned(ParallelConfig(1, 4), ParallelConfig(2, 6), 24, 7)


sizes = st.builds(ParallelConfig, st.integers(1, 4), st.integers(1, 8))


@given(sizes, sizes, st.integers(1, 64), st.integers(1, 64))
def test_a_placement_has_every_rank_once_with_both_ends_of_its_layers(
    prefill, decode, layers, devices
):
    assume(max(prefill.pipeline_parallel_size, decode.pipeline_parallel_size) <= layers)
    try:
        hosts = place_aligned(prefill, decode, layers, devices)
    except InvalidArgumentError:
        assume(False)
    assert [host.layers[0] for host in hosts[1:]] == [host.layers[1] for host in hosts[:-1]]
    assert (hosts[0].layers[0], hosts[-1].layers[1]) == (0, layers)
    for parallel, name in ((prefill, "prefill_ranks"), (decode, "decode_ranks")):
        ranks = [rank for host in hosts for rank in getattr(host, name)]
        assert ranks == list(range(parallel.num_ranks))
        for host in hosts:
            stages = {rank // parallel.tensor_parallel_size for rank in getattr(host, name)}
            held = [parallel.stage_layers(layers)[stage] for stage in sorted(stages)]
            assert held[0][0] == host.layers[0]
            assert held[-1][1] == host.layers[1]
    assert all(host.num_devices <= devices for host in hosts)
