"""Who holds which KV block: the ownership law.

Every block is free, cached, owned, leased or quarantined, and the five always add up to all.
Only ids live here; the memory is a worker's.

A full block's KV follows from the tokens up to its end, so blocks are found again by a key that
stands for these tokens (`splitserve.kv.keys`). Nobody writes to such a block any more, so any
number of requests and leases may hold it at once; the strongest hold is its state.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from splitserve.core.errors import ResourceExhaustedError
from splitserve.kv.keys import PrefixKey


class BlockState(Enum):
    """Who holds a block."""

    FREE = "free"
    CACHED = "cached"
    OWNED = "owned"
    LEASED = "leased"
    QUARANTINED = "quarantined"


_HOLDS = (BlockState.LEASED, BlockState.QUARANTINED, BlockState.OWNED)
"""Of a block that several hold, the first of these is its state."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state."""

    total: int
    free: int
    cached: int
    owned: int
    leased: int
    quarantined: int


class BlockManager:
    """Hands out fixed-size KV blocks by id and knows who holds each.

    Attributes:
        num_blocks: All blocks.
        block_size: Tokens in a block.
        on_free: Called whenever blocks came back, so that whoever waits for some looks again.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_free: Callable[[], None] = lambda: None
        # A stack: the block freed last is the likeliest to be in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Held by nobody, but worth keeping; the one unused for longest comes first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holds = {hold: [0] * num_blocks for hold in _HOLDS}
        self._num_in: Counter[BlockState] = Counter()
        self._by_key: dict[PrefixKey, int] = {}
        self._keys: dict[int, PrefixKey] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            owned=self._num_in[BlockState.OWNED],
            leased=self._num_in[BlockState.LEASED],
            quarantined=self._num_in[BlockState.QUARANTINED],
        )

    def find(self, keys: Iterable[PrefixKey]) -> list[int]:
        """The blocks that hold a sequence's first tokens, as far as there are any."""
        found = []
        for key in keys:
            if (block_id := self._by_key.get(key)) is None:
                break
            found.append(block_id)
        return found

    def fit(self, count: int, found: Sequence[int] = ()) -> bool:
        """Whether `allocate` would succeed."""
        kept = sum(block_id in self._cached for block_id in found)
        return count - len(found) <= self.num_available - kept

    def allocate(self, count: int, found: Sequence[int] = ()) -> list[int]:
        """Takes blocks for a request, which owns them from here on.

        Args:
            count: How many.
            found: The first of them, by `find`, just now; others may hold these too.

        Returns:
            ``found``, and as many blocks beside them that nobody else holds. Cached ones are
            taken once no others are left.

        Raises:
            ResourceExhaustedError: There are too few; none was taken.
        """
        if not self.fit(count, found):
            raise ResourceExhaustedError(
                f"blocks: {count} asked for, {self.num_available} available"
            )
        self._change(found, add=BlockState.OWNED)
        fresh = [self._take() for _ in range(count - len(found))]
        self._change(fresh, add=BlockState.OWNED)
        return [*found, *fresh]

    def remember(self, key: PrefixKey, block_id: int) -> None:
        """Lets an owned block be found: it is full, and nobody writes to it any more.

        Where another block holds the same tokens already, that one stays to be found.
        """
        assert self._holds[BlockState.OWNED][block_id], f"block {block_id} is not owned"
        if key not in self._by_key and block_id not in self._keys:
            self._by_key[key] = block_id
            self._keys[block_id] = key

    def share(self, block_ids: Iterable[int], owners: int) -> None:
        """Gives an owner's blocks so many owners in all; each of them frees them."""
        ids = list(block_ids)
        for _ in range(owners - 1):
            self._change(ids, add=BlockState.OWNED)

    def lease(self, block_ids: Iterable[int]) -> None:
        """Holds a request's blocks for a decode node: owned to leased."""
        self._change(block_ids, drop=BlockState.OWNED, add=BlockState.LEASED)

    def lease_too(self, block_ids: Iterable[int]) -> None:
        """Holds a request's blocks for a decode node beside the request, which still fills them."""
        self._change(block_ids, add=BlockState.LEASED)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Keeps an ended lease's blocks back while a reader may copy: leased to quarantined."""
        self._change(block_ids, drop=BlockState.LEASED, add=BlockState.QUARANTINED)

    def free(self, block_ids: Iterable[int], hold: BlockState = BlockState.OWNED) -> None:
        """Gives up a hold on blocks; those that nobody else holds are cached, or free.

        Args:
            block_ids: Which, in token order: the last are the first to be taken again.
            hold: Owned, or quarantined.
        """
        assert hold is not BlockState.LEASED, "a lease's blocks pass through quarantine"
        self._change(block_ids, drop=hold)
        self.on_free()

    def _state(self, block_id: int) -> BlockState:
        for hold in _HOLDS:
            if self._holds[hold][block_id]:
                return hold
        return BlockState.CACHED if block_id in self._keys else BlockState.FREE

    def _take(self) -> int:
        """A block that nobody holds; what a cached one held can be found no more."""
        if self._free:
            return self._free.pop()
        block_id, _ = self._cached.popitem(last=False)
        del self._by_key[self._keys.pop(block_id)]
        return block_id

    def _change(
        self,
        block_ids: Iterable[int],
        *,
        drop: BlockState | None = None,
        add: BlockState | None = None,
    ) -> None:
        ids = list(block_ids)
        # Check all before any change: a caller's mistake must not leave half of it behind.
        assert len(set(ids)) == len(ids), f"a block is named twice: {ids}"
        for block_id in ids:
            assert drop is None or self._holds[drop][block_id], f"block {block_id} is not {drop}"
        # Backwards, so that a sequence is taken again from its end.
        for block_id in reversed(ids):
            before = self._state(block_id)
            if drop is not None:
                self._holds[drop][block_id] -= 1
            if add is not None:
                self._holds[add][block_id] += 1
            self._moved(block_id, before, self._state(block_id))

    def _moved(self, block_id: int, before: BlockState, now: BlockState) -> None:
        if before is now:
            return
        self._num_in[before] -= 1
        self._num_in[now] += 1
        if before is BlockState.CACHED:
            del self._cached[block_id]
        if now is BlockState.CACHED:
            self._cached[block_id] = None
        elif now is BlockState.FREE:
            self._free.append(block_id)

    def check(self) -> None:
        """Asserts the ownership law; for tests and debugging."""
        states = [self._state(block_id) for block_id in range(self.num_blocks)]
        assert sorted(self._free) == [b for b, s in enumerate(states) if s is BlockState.FREE]
        assert sorted(self._cached) == [b for b, s in enumerate(states) if s is BlockState.CACHED]
        for hold in _HOLDS:
            assert self._num_in[hold] == states.count(hold)
        assert {key: block for block, key in self._keys.items()} == self._by_key
