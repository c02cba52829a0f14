"""Tickets: this node's hold on KV that a decode node is to pull, and the quarantine behind it.

A lease lives from the end of prefill until it is released by its reader, ended by its router, or
expired. A reader that comes earlier has one that grows with the prompt. Its blocks are nobody
else's while it lives; after that they stay in quarantine for as long as a reader may still be
copying them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from splitserve.core.errors import NotFoundError
from splitserve.kv.blocks import BlockManager, BlockState


@dataclass(slots=True, eq=False)
class Lease:
    """A hold on one request's KV.

    Attributes:
        ticket: The router's name for the hand-over.
        block_ids: The blocks, in token order.
        num_tokens: Tokens with KV.
        expires_at_s: When it ends unless renewed, on the clock of `Leases`.
        readings: Everybody who has it open; each may be copying.
        live: Whether it still holds.
        growing: Whether its request still computes and owns the blocks too.
    """

    ticket: str
    block_ids: tuple[int, ...]
    num_tokens: int
    expires_at_s: float
    readings: set["Reading"] = field(default_factory=set)
    live: bool = True
    growing: bool = False


@dataclass(slots=True, eq=False)
class Reading:
    """One reader's open of a lease.

    Attributes:
        lease: What it reads.
        reader_epoch: Who reads.
        news: Set whenever a growing lease has grown or ended.
    """

    lease: Lease
    reader_epoch: str
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Leases:
    """All leases of one prefill node.

    Args:
        blocks: The node's blocks; leasing and freeing go through it.
        ttl_s: Life of a lease that nobody renews.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        blocks: BlockManager,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self._ttl_s = ttl_s
        self._clock = clock
        self._live: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._live

    def grant(self, ticket: str, block_ids: Iterable[int], num_tokens: int) -> None:
        """Takes over a request's blocks, all filled: owned to leased."""
        held = tuple(block_ids)
        if ticket in self._live:
            self.grow(ticket, num_tokens)
            self._live[ticket].growing = False
            self._blocks.free(held)
        else:
            self._blocks.lease(held)
            self._add(Lease(ticket, held, num_tokens, self._clock() + self._ttl_s))

    def grant_early(self, ticket: str, block_ids: Iterable[int], num_tokens: int) -> None:
        """Lets readers have the tokens that a request has by now; `grow` tells of more."""
        held = tuple(block_ids)
        self._blocks.lease_too(held)
        expires_at_s = self._clock() + self._ttl_s
        self._add(Lease(ticket, held, num_tokens, expires_at_s, growing=True))

    def grow(self, ticket: str, num_tokens: int) -> None:
        """The request has so many tokens now; without an early lease that is nobody's business."""
        if lease := self._live.get(ticket):
            lease.num_tokens = num_tokens
            _tell(lease)

    def _add(self, lease: Lease) -> None:
        assert lease.ticket not in self._live, "a ticket is never used twice"
        self._live[lease.ticket] = lease

    def renew(self, tickets: Iterable[str]) -> None:
        """Starts the time to live of these leases anew; ended ones stay ended."""
        expires_at_s = self._clock() + self._ttl_s
        for ticket in tickets:
            if lease := self._live.get(ticket):
                lease.expires_at_s = expires_at_s

    def open(self, ticket: str, reader_epoch: str) -> Reading:
        """Lets a reader copy. Every open is followed by `close`, whatever comes between.

        Raises:
            NotFoundError: The ticket is not leased here, or no longer.
        """
        lease = self._live.get(ticket)
        if lease is None:
            raise NotFoundError("ticket: not leased here; its lease has ended or never was")
        reading = Reading(lease, reader_epoch)
        lease.readings.add(reading)
        return reading

    def close(self, reading: Reading) -> None:
        """The reader copies no more: it has released, failed or gone."""
        lease = reading.lease
        lease.readings.remove(reading)
        self._free_unless_held(lease)

    def release(self, ticket: str, reader_epoch: str) -> bool:
        """Ends the lease for a reader that is done; its blocks come back with its `close`.

        Returns:
            Whether the lease held from this reader's open to now. If not, what it copied may be
            somebody else's.
        """
        lease = self._live.get(ticket)
        if (
            lease is None
            or lease.growing
            or all(r.reader_epoch != reader_epoch for r in lease.readings)
        ):
            return False
        self.cancel(ticket)
        return True

    def cancel(self, ticket: str) -> None:
        """Ends a lease; unknown tickets are ignored."""
        lease = self._live.get(ticket)
        if lease is None:
            return
        lease.live = False
        _tell(lease)
        del self._live[ticket]
        # Even with no reader left the blocks pass through quarantine: one way out of a lease.
        self._blocks.quarantine(lease.block_ids)
        self._free_unless_held(lease)

    def expire(self) -> list[str]:
        """Ends every lease whose time is over, and names them."""
        now = self._clock()
        expired = [ticket for ticket, lease in self._live.items() if lease.expires_at_s <= now]
        for ticket in expired:
            self.cancel(ticket)
        return expired

    def _free_unless_held(self, lease: Lease) -> None:
        if not lease.live and not lease.readings:
            self._blocks.free(lease.block_ids, BlockState.QUARANTINED)


def _tell(lease: Lease) -> None:
    for reading in lease.readings:
        reading.news.set()
