"""Where leased blocks lie and how to reach them."""

from dataclasses import dataclass

from splitserve.kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's KV cache.

    Attributes:
        layout: What it holds.
        num_blocks: Blocks in the memory.
        location: Where it is, in the transport's own terms: for ``shm`` the segment's name.
    """

    layout: KVLayout
    num_blocks: int
    location: str


@dataclass(frozen=True, slots=True)
class KvHandle:
    """A ticket's KV, as its decode node gets to know it.

    Attributes:
        transport: How to reach it, for example ``"shm"``.
        num_tokens: Tokens with KV.
        block_ids: Blocks in token order, the same on every rank.
        ranks: Each rank's memory.
        growing: Whether the prompt is still computed, and more tokens are to come.
    """

    transport: str
    num_tokens: int
    block_ids: tuple[int, ...]
    ranks: tuple[RankMemory, ...]
    growing: bool = False
