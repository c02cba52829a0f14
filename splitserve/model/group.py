"""What the ranks that share a layer say to each other."""

import torch
from torch import Tensor, distributed

from splitserve.model.part import Cut


class TensorGroup:
    """The tensor ranks of one stage.

    Args:
        rank: This one's place among them.
        size: How many they are.
        group: Their process group; None for a rank that is alone.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: distributed.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def sum_(self, part: Tensor) -> Tensor:
        """Every rank's tensor added up, in place and on every rank."""
        if self.size > 1:
            distributed.all_reduce(part, group=self._group)
        return part

    def join(self, part: Tensor, total: int) -> Tensor | None:
        """Every rank's share of ``[T, total]`` side by side on the first rank, None on others."""
        if self.size == 1:
            return part
        cuts = [Cut.share(total, rank, self.size) for rank in range(self.size)]
        width = max(cut.size for cut in cuts)
        # Messages of one gather are of one size.
        padded = torch.nn.functional.pad(part, (0, width - part.shape[1]))
        if self.rank:
            distributed.gather(padded, group=self._group, group_dst=0)
            return None
        parts = [torch.empty_like(padded) for _ in cuts]
        distributed.gather(padded, parts, group=self._group, group_dst=0)
        return torch.cat([one[:, : cut.size] for one, cut in zip(parts, cuts, strict=True)], -1)


ALONE = TensorGroup()
"""A rank that holds whole layers."""
