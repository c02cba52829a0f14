"""Serves leased KV to decode nodes."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from prefill_node.leases import Leases
from splitserve.core.errors import FailedPreconditionError
from splitserve.kv.handle import KvHandle, RankMemory
from splitserve.rpc.convert import handle_to_proto
from splitserve.v1 import kv_pb2, kv_pb2_grpc


class KvSource(kv_pb2_grpc.KvSourceServicer):
    """Opens tickets and takes them back.

    Args:
        epoch: This start of the node; calls meant for another are refused.
        transport: How its memory is reached.
        memories: Each rank's memory.
        leases: What may be opened.
        lease_early: Leases the ticket of a prompt that is still computed.
        on_release: Called with a ticket that its reader has given back.
    """

    def __init__(
        self,
        epoch: str,
        transport: str,
        memories: tuple[RankMemory, ...],
        leases: Leases,
        lease_early: Callable[[str], None],
        on_release: Callable[[str], None],
    ) -> None:
        self._epoch = epoch
        self._transport = transport
        self._memories = memories
        self._leases = leases
        self._lease_early = lease_early
        self._on_release = on_release

    # Writes through the context: a generator left suspended by a cancelled call would let go of
    # the lease only when it is collected.
    async def Open(  # type: ignore[override]
        self, request: kv_pb2.OpenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Answers the handle and stays open: the call's life is the reader's hold."""
        self._check_epoch(request.epoch)
        if request.ticket not in self._leases:
            self._lease_early(request.ticket)
        reading = self._leases.open(request.ticket, request.reader_epoch)
        lease = reading.lease
        try:
            growing = lease.growing
            handle = KvHandle(
                self._transport, lease.num_tokens, lease.block_ids, self._memories, growing
            )
            await context.write(handle_to_proto(handle))
            while growing:
                await reading.news.wait()
                reading.news.clear()
                if not lease.live:
                    return
                growing = lease.growing
                await context.write(kv_pb2.KvHandle(num_tokens=lease.num_tokens, growing=growing))
            # Ends when the reader ends the call, or is gone and the connection with it.
            await asyncio.Event().wait()
        finally:
            self._leases.close(reading)

    async def Release(self, request: kv_pb2.ReleaseRequest, context: Any) -> kv_pb2.ReleaseResponse:
        """Ends the lease and says whether it held all along."""
        self._check_epoch(request.epoch)
        intact = self._leases.release(request.ticket, request.reader_epoch)
        if intact:
            self._on_release(request.ticket)
        return kv_pb2.ReleaseResponse(intact=intact)

    def _check_epoch(self, epoch: str) -> None:
        if epoch != self._epoch:
            raise FailedPreconditionError("epoch: this prefill node has been started anew since")
