"""Who holds which KV block: the ownership law.

Every block is free, owned, leased or quarantined, and the four always add up to all.
Only ids live here; the memory is a worker's.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from splitserve.core.errors import ResourceExhaustedError


class BlockState(Enum):
    """Who holds a block."""

    FREE = "free"
    OWNED = "owned"
    LEASED = "leased"
    QUARANTINED = "quarantined"


_MOVES = {
    (BlockState.FREE, BlockState.OWNED),
    (BlockState.OWNED, BlockState.FREE),
    (BlockState.OWNED, BlockState.LEASED),
    (BlockState.LEASED, BlockState.QUARANTINED),
    (BlockState.QUARANTINED, BlockState.FREE),
}


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state."""

    total: int
    free: int
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
        self._state = [BlockState.FREE] * num_blocks
        # A stack: the block freed last is the likeliest to be in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: Counter[BlockState] = Counter()
        # Owners of a block beyond its first; each of them frees it once.
        self._more_owners: Counter[int] = Counter()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_free(self) -> int:
        """Blocks that are nobody's."""
        return len(self._free)

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free),
            owned=self._held[BlockState.OWNED],
            leased=self._held[BlockState.LEASED],
            quarantined=self._held[BlockState.QUARANTINED],
        )

    def allocate(self, count: int) -> list[int]:
        """Takes blocks for a request: free to owned.

        Raises:
            ResourceExhaustedError: Fewer are free; none was taken.
        """
        if count > len(self._free):
            raise ResourceExhaustedError(f"blocks: {count} asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        self._mark(taken, BlockState.OWNED)
        return taken

    def share(self, block_ids: Iterable[int], owners: int) -> None:
        """Gives owned blocks so many owners in all; the last one's `free` gives them back."""
        for block_id in block_ids:
            assert self._state[block_id] is BlockState.OWNED, f"block {block_id} is not owned"
            self._more_owners[block_id] += owners - 1

    def lease(self, block_ids: Iterable[int]) -> None:
        """Holds a request's blocks for a decode node: owned to leased."""
        self._move(block_ids, BlockState.LEASED)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Keeps an ended lease's blocks back while a reader may copy: leased to quarantined."""
        self._move(block_ids, BlockState.QUARANTINED)

    def free(self, block_ids: Iterable[int]) -> None:
        """Gives blocks back, whoever holds them; shared ones are kept for their other owners."""
        ids = list(block_ids)
        last = [block_id for block_id in ids if not self._more_owners[block_id]]
        self._move(last, BlockState.FREE)
        self._more_owners -= Counter(ids)
        self._free.extend(reversed(last))
        self.on_free()

    def _move(self, block_ids: Iterable[int], to: BlockState) -> None:
        ids = list(block_ids)
        # Check all before any moves: a caller's mistake must not leave half a move behind.
        assert len(set(ids)) == len(ids), f"a block is named twice: {ids}"
        for block_id in ids:
            assert not self._more_owners[block_id], f"block {block_id} is shared"
            move = (self._state[block_id], to)
            assert move in _MOVES, f"block {block_id}: {move[0].value} cannot become {to.value}"
        self._mark(ids, to)

    def _mark(self, block_ids: list[int], to: BlockState) -> None:
        for block_id in block_ids:
            self._held[self._state[block_id]] -= 1
            self._state[block_id] = to
        self._held[to] += len(block_ids)

    def check(self) -> None:
        """Asserts the ownership law; for tests and debugging."""
        assert Counter(self._state)[BlockState.FREE] == len(set(self._free)) == len(self._free)
        assert all(self._state[block_id] is BlockState.FREE for block_id in self._free)
        for state in (BlockState.OWNED, BlockState.LEASED, BlockState.QUARANTINED):
            assert self._held[state] == Counter(self._state)[state]
