"""Memory for weights in large pages.

A step reads all weights once. In pages of 4 KiB much of that time goes to finding the pages: with
large ones, a step that only reads weights is half as fast again.
"""

import mmap

import torch
from torch import Tensor

_REGION_BYTES = 64 << 20
_ALIGNMENT = 64

_region = torch.empty(0, dtype=torch.uint8)
"""What is left of the last region. Regions live as long as any tensor in them."""


def in_large_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy in large pages, where the system has them."""
    global _region
    size = tensor.numel() * tensor.element_size()
    if size > _region.numel():
        _region = _new_region(max(size, _REGION_BYTES))
    aligned = -(-size // _ALIGNMENT) * _ALIGNMENT
    place, _region = _region[:size], _region[aligned:]
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _new_region(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
