"""A rank's KV: one tensor over a shared-memory segment."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitserve.core.errors import FailedPreconditionError
from splitserve.kv.handle import RankMemory
from splitserve.kv.layout import DTYPE_BYTES, KVLayout
from splitserve.kv.memory import Segment

_RAW_DTYPES = {2: np.uint16, 4: np.uint32}


class KVCache:
    """A rank's KV, ``[num_blocks, layers, 2, heads, block_size, head_dim]``.

    Attributes:
        layout: What it holds.
        num_blocks: Blocks in it.
        location: The segment's name.
        raw: The same memory as unsigned integers: what copies KV need not know its type, and
            numpy has no bfloat16. Not writable where the cache is a peer's.
    """

    def __init__(self, segment: Segment, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.location = segment.name
        self._segment = segment
        dtype = _RAW_DTYPES[DTYPE_BYTES[layout.dtype]]
        elements = num_blocks * layout.block_bytes // np.dtype(dtype).itemsize
        shape = (num_blocks, *layout.block_shape)
        self.raw: NDArray[Any] = np.frombuffer(segment.buffer, dtype, elements).reshape(shape)

    @classmethod
    def create(cls, name: str, layout: KVLayout, num_blocks: int) -> "KVCache":
        """Makes this rank's cache, all zeros.

        Raises:
            ResourceExhaustedError: There is not that much shared memory.
        """
        return cls(Segment.create(name, num_blocks * layout.block_bytes), layout, num_blocks)

    @classmethod
    def open_readonly(cls, memory: RankMemory) -> "KVCache":
        """Maps a peer's cache.

        Raises:
            UnavailableError: It is not there.
            FailedPreconditionError: It is smaller than its owner says.
        """
        segment = Segment.open_readonly(memory.location)
        size_bytes = memory.num_blocks * memory.layout.block_bytes
        if segment.size_bytes < size_bytes:
            segment.close()
            raise FailedPreconditionError(
                f"shared memory: {memory.location} has {segment.size_bytes:,} bytes; "
                f"its {memory.num_blocks} blocks need {size_bytes:,}"
            )
        return cls(segment, memory.layout, memory.num_blocks)

    @property
    def tensor(self) -> Tensor:
        """The memory as a tensor; for the rank that owns it."""
        assert self.raw.flags.writeable, f"{self.location} is a peer's"
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return torch.from_numpy(self.raw).view(dtype)

    @property
    def alive(self) -> bool:
        """Whether the owner still has the memory."""
        return self._segment.linked

    def close(self) -> None:
        """Lets go of the memory once the last tensor or view over it is gone."""
        self.raw = np.empty(0, self.raw.dtype)
        self._segment.close()
