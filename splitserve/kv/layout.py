"""The shape of a rank's KV cache."""

from dataclasses import dataclass

from splitserve.core.errors import invalid

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Data types KV can have, and their size."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Model-wide shape, which part of it a rank holds, block size and dtype.

    A rank's cache is ``[blocks, layers, 2, heads, block_size, head_dim]``: block first, so that
    with equal layouts one block is one contiguous copy. Index 2 holds keys, then values.

    Attributes:
        num_layers: Layers of the model.
        num_kv_heads: KV heads of the model.
        head_dim: Size of a head.
        block_size: Tokens in a block.
        dtype: Name of the data type, a key of `DTYPE_BYTES`.
        layer_begin: First layer of this rank.
        layer_end: One past its last.
        head_begin: First KV head of this rank.
        head_end: One past its last.

    Raises:
        InvalidArgumentError: The part does not lie within the model.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise invalid("dtype", self.dtype, ", ".join(DTYPE_BYTES))
        if self.head_dim < 1:
            raise invalid("head_dim", self.head_dim, "at least 1")
        if self.block_size < 1:
            raise invalid("block_size", self.block_size, "at least 1")
        if not 0 <= self.layer_begin < self.layer_end <= self.num_layers:
            raise invalid(
                "layers", (self.layer_begin, self.layer_end), f"within 0..{self.num_layers}"
            )
        if not 0 <= self.head_begin < self.head_end <= self.num_kv_heads:
            raise invalid(
                "heads", (self.head_begin, self.head_end), f"within 0..{self.num_kv_heads}"
            )

    @property
    def layers(self) -> int:
        """Layers this rank holds."""
        return self.layer_end - self.layer_begin

    @property
    def heads(self) -> int:
        """KV heads this rank holds."""
        return self.head_end - self.head_begin

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: ``[layers, 2, heads, block_size, head_dim]``."""
        return (self.layers, 2, self.heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV on this rank."""
        return self.layers * 2 * self.heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank."""
        return self.token_bytes * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)
