"""A rank's place among its node's: who it computes layers with, and who comes before and after."""

import socket
from datetime import timedelta

import torch
from torch import Tensor, distributed

from splitserve.core.parallel import ParallelConfig
from splitserve.model.group import TensorGroup

MEET_TIMEOUT_S = 120.0
"""How long ranks wait for one another at start."""

EXCHANGE_TIMEOUT_S = 3600.0
"""How long a rank waits for another's message. A stage may have nothing to do for long; ranks that
die are noticed by their node."""


class Ranks:
    """All ranks of a node, seen from one of them.

    Args:
        parallel: How many there are.
        rank: This one.
        host: Where they meet; not used by a rank that is alone.
        port: The port there.
        listener: The first rank's: the socket that listens there.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        rank: int,
        host: str,
        port: int,
        listener: socket.socket | None,
    ) -> None:
        self._rank = rank
        self._stride = parallel.tensor_parallel_size
        self._sending: tuple[distributed.Work, Tensor] | None = None
        self.tensor = TensorGroup()
        if parallel.num_ranks > 1:
            _meet(parallel.num_ranks, rank, (host, port), listener)
            self.tensor = _tensor_group(parallel, rank)

    def receive(self, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """Hidden states ``[T, E]`` from the stage before."""
        hidden = torch.empty(num_tokens, width, dtype=dtype)
        distributed.recv(hidden, self._rank - self._stride)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Gives hidden states to the next stage, which may still be at the step before."""
        if self._sending is not None:
            self._sending[0].wait()
        work = distributed.isend(hidden, self._rank + self._stride)
        assert work is not None, "this rank is in the group it sends to"
        self._sending = (work, hidden)


def _meet(
    num_ranks: int, rank: int, address: tuple[str, int], listener: socket.socket | None
) -> None:
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        *address,
        num_ranks,
        is_master=listener is not None,
        timeout=timedelta(seconds=MEET_TIMEOUT_S),
        master_listen_fd=None if listener is None else listener.detach(),
    )
    distributed.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
    )


def _tensor_group(parallel: ParallelConfig, rank: int) -> TensorGroup:
    size = parallel.tensor_parallel_size
    if size == 1:
        return TensorGroup()
    stage, tensor_rank = divmod(rank, size)
    # Every rank takes part in making every group.
    groups = [
        distributed.new_group(list(range(first, first + size)))
        for first in range(0, parallel.num_ranks, size)
    ]
    return TensorGroup(tensor_rank, size, groups[stage])
