"""Tensors in large pages are copies like any other."""

import torch

from splitserve.model import pages


def test_copies_are_equal_and_apart(monkeypatch) -> None:
    monkeypatch.setattr(pages, "_REGION_BYTES", 4096)
    tensors = [
        torch.arange(count, dtype=torch.float32).to(dtype)
        for count in (0, 1, 3, 700, 5_000, 17)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    copies = [pages.in_large_pages(tensor) for tensor in tensors]
    for copy in copies:
        assert copy.data_ptr() % 64 == 0
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)
        copy.fill_(-1)
    assert all(bool((copy == -1).all()) for copy in copies)
    assert not any(bool((tensor == -1).any()) for tensor in tensors)
