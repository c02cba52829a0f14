import gc
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splitserve.core.errors import FailedPreconditionError, UnavailableError
from splitserve.kv.cache import KVCache
from splitserve.kv.handle import KvHandle, RankMemory
from splitserve.kv.layout import KVLayout
from splitserve.transfer import shm
from splitserve.transfer.shm import ShmExporter, ShmImporter
from splitserve.transfer.transport import PullJob

LAYOUT = KVLayout(2, 4, 8, 16, "bfloat16", 0, 2, 0, 4)


def fill(cache: KVCache, first: int = 0) -> None:
    values = (first + np.arange(cache.raw.size)) % 65_521
    cache.raw[...] = values.reshape(cache.raw.shape)


def handle(*memories: RankMemory, block_ids=(5, 2), num_tokens=20) -> KvHandle:
    return KvHandle("shm", num_tokens, tuple(block_ids), memories)


def mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


@pytest.fixture
def target(make_cache):
    return make_cache(LAYOUT, 8)


@pytest.fixture
def importer(target):
    importer = ShmImporter(target, rank=0)
    yield importer
    importer.close()
    assert importer.num_mapped == 0


@pytest.fixture
def source(make_cache):
    cache = make_cache(LAYOUT, 8)
    fill(cache)
    return cache


def test_a_pull_copies_the_tokens_and_reports_their_bytes(importer, source, target):
    job = PullJob(handle(ShmExporter(source).export()), (0, 7, 1))
    result = importer.pull(job)
    np.testing.assert_array_equal(target.raw[0], source.raw[5])
    np.testing.assert_array_equal(target.raw[7, ..., :4, :], source.raw[2, ..., :4, :])
    assert not target.raw[7, ..., 4:, :].any(), "another request's tokens stay where they are"
    assert not target.raw[1:7].any()
    assert result.size_bytes == 20 * LAYOUT.token_bytes
    assert result.duration_ns > 0


def test_the_tensor_shows_what_was_pulled(importer, source, target):
    importer.pull(PullJob(handle(ShmExporter(source).export()), (0, 7)))
    assert target.tensor.dtype == torch.bfloat16
    assert target.tensor.shape == (8, 2, 2, 4, 16, 8)
    torch.testing.assert_close(target.tensor[0], source.tensor[5], equal_nan=True, rtol=0, atol=0)


def test_two_source_ranks_make_one_target(importer, make_cache, target):
    halves = [
        make_cache(replace(LAYOUT, block_size=8, head_begin=begin, head_end=begin + 2), 6)
        for begin in (0, 2)
    ]
    for first, half in enumerate(halves):
        fill(half, first * 100)
    memories = [ShmExporter(half).export() for half in halves]
    importer.pull(PullJob(handle(*memories, block_ids=(3, 1, 4), num_tokens=24), (6, 0)))
    for number, half in enumerate(halves):
        heads = slice(2 * number, 2 * number + 2)
        np.testing.assert_array_equal(target.raw[6, :, :, heads, :8], half.raw[3])
        np.testing.assert_array_equal(target.raw[6, :, :, heads, 8:], half.raw[1])
        np.testing.assert_array_equal(target.raw[0, :, :, heads, :8], half.raw[4])


def test_a_peer_is_mapped_once_and_read_only(importer, source):
    job = PullJob(handle(ShmExporter(source).export()), (0, 1))
    importer.pull(job)
    importer.pull(job)
    assert importer.num_mapped == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peer = KVCache.open_readonly(job.handle.ranks[0])
    assert not peer.raw.flags.writeable
    peer.close()


def test_peers_beyond_the_limit_are_unmapped_oldest_first(importer, make_cache, monkeypatch):
    monkeypatch.setattr(shm, "MAX_MAPPED_PEERS", 2)
    memories = [ShmExporter(make_cache(LAYOUT, 8)).export() for _ in range(3)]
    for number in (0, 1, 0, 2):
        importer.pull(PullJob(handle(memories[number]), (0, 1)))
    assert importer.num_mapped == 2
    # 1 is unmapped; the other two may be pulled from without their files.
    peers = [memory.location for memory in importer._peers]
    assert peers == [memories[0].location, memories[2].location]


def test_one_pull_may_map_more_ranks_than_the_limit(importer, make_cache, monkeypatch):
    monkeypatch.setattr(shm, "MAX_MAPPED_PEERS", 1)
    ranks = [
        make_cache(replace(LAYOUT, head_begin=head, head_end=head + 1), 8) for head in range(4)
    ]
    memories = [ShmExporter(rank).export() for rank in ranks]
    result = importer.pull(PullJob(handle(*memories), (0, 1)))
    assert result.size_bytes == 20 * LAYOUT.token_bytes


def test_memory_of_a_dead_peer_is_returned(importer, make_cache):
    cache = make_cache(LAYOUT, 8)
    importer.pull(PullJob(handle(ShmExporter(cache).export()), (0, 1)))
    cache.close()
    gc.collect()
    assert mapped(cache.location), "the importer still holds it"
    importer.drop_dead()
    assert importer.num_mapped == 0
    assert not mapped(cache.location)


def test_a_peer_that_is_gone_is_unavailable_even_if_it_was_mapped(importer, make_cache):
    cache = make_cache(LAYOUT, 8)
    job = PullJob(handle(ShmExporter(cache).export()), (0, 1))
    importer.pull(job)
    cache.close()
    with pytest.raises(UnavailableError, match=cache.location):
        importer.pull(job)


@pytest.mark.parametrize(
    ("source_ids", "target_ids"), [((5, 8), (0, 1)), ((-1, 2), (0, 1)), ((5, 2), (0, 8))]
)
def test_blocks_that_do_not_exist_are_refused(importer, source, target, source_ids, target_ids):
    memory = ShmExporter(source).export()
    with pytest.raises(FailedPreconditionError, match="block_ids"):
        importer.pull(PullJob(handle(memory, block_ids=source_ids), target_ids))
    assert not target.raw.any()


def test_memory_smaller_than_its_owner_says_is_refused(importer, source):
    memory = replace(ShmExporter(source).export(), num_blocks=9)
    with pytest.raises(FailedPreconditionError, match="9 blocks need"):
        importer.pull(PullJob(handle(memory), (0, 1)))


def test_another_transport_is_refused(importer, source):
    offered = replace(handle(ShmExporter(source).export()), transport="tcp")
    with pytest.raises(FailedPreconditionError, match="tcp"):
        importer.pull(PullJob(offered, (0, 1)))
