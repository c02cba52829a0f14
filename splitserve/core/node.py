"""What a node is."""

from dataclasses import dataclass
from enum import Enum


class NodeKind(Enum):
    """Which half of the work a node does; the values are the wire's numbers."""

    PREFILL = 1
    DECODE = 2

    @property
    def label(self) -> str:
        """The word for logs and tables."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one rank of a node holds.

    Attributes:
        weight_bytes: Memory its weights take.
        kv_bytes: Memory its KV blocks take.
    """

    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node is; all of it is fixed for one start of the node.

    Attributes:
        kind: Which half of the work it does.
        address: Where the router dials back, ``host:port``.
        epoch: Random at every start.
        model: The model's name, for people.
        model_fingerprint: Identity of architecture, weights and vocabulary.
        vocab_size: Size of the vocabulary.
        kv_dtype: Data type of KV, for example ``"bfloat16"``.
        block_size: Tokens in a KV block.
        num_blocks: KV blocks the node owns.
        max_model_len: Most tokens of prompt and answer together.
        transports: Ways to move KV that the node can use, best first.
        version: Release of splitserve.
        ranks: What each rank holds, in order.
        prefix_cache: Whether KV of earlier requests is kept and found again.
    """

    kind: NodeKind
    address: str
    epoch: str
    model: str
    model_fingerprint: str
    vocab_size: int
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    transports: tuple[str, ...]
    version: str
    ranks: tuple[RankInfo, ...] = ()
    prefix_cache: bool = True

    @property
    def name(self) -> str:
        """How logs and lifetimes call it."""
        return f"{self.kind.label}@{self.address}"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node's blocks and queues at one moment; the kinds of blocks add up to all."""

    info: NodeInfo
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_leased: int
    blocks_quarantined: int
    waiting: int
    running: int
    importing: int
    computed_tokens_total: int
    sampled_tokens_total: int
    cached_tokens_total: int
    serving: bool
