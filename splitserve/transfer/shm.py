"""KV between processes of one host: the target maps the source's memory and copies from it."""

import time
from collections import OrderedDict
from collections.abc import Sequence

from splitserve.core.errors import FailedPreconditionError
from splitserve.kv.cache import KVCache
from splitserve.kv.handle import RankMemory
from splitserve.transfer.copy import copy_planned
from splitserve.transfer.plan import plan_transfer
from splitserve.transfer.transport import PullJob, PullResult

TRANSPORT = "shm"

MAX_MAPPED_PEERS = 64
"""Source ranks kept mapped; the one unused for longest goes first."""


class ShmExporter:
    """A source rank's side: the cache lies in shared memory already.

    Args:
        cache: The rank's own.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def export(self) -> RankMemory:
        """How a peer reaches this rank's cache; the same for all tickets."""
        return RankMemory(self._cache.layout, self._cache.num_blocks, self._cache.location)

    def close(self) -> None:
        """Takes the memory's name away; peers that mapped it keep what they mapped."""
        self._cache.close()


class ShmImporter:
    """A target rank's side.

    Args:
        cache: The rank's own, which pulls write to.
        rank: The rank's number.
    """

    def __init__(self, cache: KVCache, rank: int) -> None:
        self._cache = cache
        self._rank = rank
        self._peers: OrderedDict[RankMemory, KVCache] = OrderedDict()

    @property
    def num_mapped(self) -> int:
        """Source ranks mapped now."""
        return len(self._peers)

    def pull(self, job: PullJob) -> PullResult:
        """Copies a ticket's KV into this rank's blocks; blocking, mostly without the GIL.

        Raises:
            UnavailableError: The source's memory cannot be reached.
            FailedPreconditionError: Its shape does not fit this model's.
        """
        begin_ns = time.monotonic_ns()
        handle, target = job.handle, self._cache
        if handle.transport != TRANSPORT:
            raise FailedPreconditionError(
                f"transport: {handle.transport!r} is offered, {TRANSPORT!r} is what we read"
            )
        plan = plan_transfer(
            [memory.layout for memory in handle.ranks],
            target.layout,
            handle.block_ids,
            job.block_ids,
            handle.num_tokens,
            first_token=job.first_token,
            spread=self._rank,
        )
        num_source_blocks = min(memory.num_blocks for memory in handle.ranks)
        _check_ids("source", handle.block_ids, num_source_blocks)
        _check_ids("target", job.block_ids, target.num_blocks)
        self.drop_dead()
        used = {region.source_rank for region in plan.regions}
        sources = {rank: self._map(handle.ranks[rank], len(used)).raw for rank in used}
        size_bytes = copy_planned(plan, sources, target.raw)
        return PullResult(size_bytes, time.monotonic_ns() - begin_ns)

    def drop_dead(self) -> None:
        """Gives back the memory of peers that are gone: as long as it is mapped, it exists."""
        for memory in [memory for memory, peer in self._peers.items() if not peer.alive]:
            self._peers.pop(memory).close()

    def close(self) -> None:
        """Lets go of every mapped peer."""
        while self._peers:
            self._peers.popitem()[1].close()

    def _map(self, memory: RankMemory, at_least: int) -> KVCache:
        peer = self._peers.pop(memory, None) or KVCache.open_readonly(memory)
        self._peers[memory] = peer
        while len(self._peers) > max(MAX_MAPPED_PEERS, at_least):
            self._peers.popitem(last=False)[1].close()
        return peer


def _check_ids(side: str, block_ids: Sequence[int], num_blocks: int) -> None:
    # Slices beyond an array are silently short, and negative ones count from its end.
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise FailedPreconditionError(
            f"block_ids: the {side} has blocks 0..{num_blocks - 1}, "
            f"not {min(block_ids)}..{max(block_ids)}"
        )
