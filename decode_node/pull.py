"""Pulls one request's KV: open, copy, release, and believe it only if it was intact."""

import asyncio
from collections import OrderedDict

import grpc

from decode_node.imports import Import
from splitserve.core.config import RPC_TIMEOUT_S
from splitserve.core.errors import FailedPreconditionError, UnavailableError
from splitserve.core.lifetime import KvTransfer
from splitserve.engine.executor import Executor
from splitserve.kv.handle import KvHandle
from splitserve.rpc.channel import open_channel
from splitserve.rpc.convert import handle_from_proto
from splitserve.rpc.errors import error_from_rpc
from splitserve.transfer.transport import PullJob
from splitserve.v1 import kv_pb2, kv_pb2_grpc

MAX_SOURCE_CHANNELS = 64
"""Prefill nodes this node stays connected to; far more than pulls can run at once, so that the
one unused for longest, which goes first, is idle."""


class Puller:
    """The reader's side of `KvSource`.

    Args:
        epoch: This start of the decode node.
        executor: Its workers, who copy.
    """

    def __init__(self, epoch: str, executor: Executor) -> None:
        self._epoch = epoch
        self._executor = executor
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def pull(self, item: Import) -> KvTransfer:
        """Copies KV into an import's blocks.

        Returns or raises, also when cancelled, only once no worker writes to the blocks.

        Raises:
            NotFoundError: The ticket is not leased at the source.
            FailedPreconditionError: The source is another start of that node, its KV has another
                shape, or the lease ended before the copy did: then nothing copied counts.
            UnavailableError: The source or its memory cannot be reached.
        """
        source = item.source
        stub = kv_pb2_grpc.KvSourceStub(await self._channel(source.address))
        opened = stub.Open(
            kv_pb2.OpenRequest(ticket=item.ticket, epoch=source.epoch, reader_epoch=self._epoch)
        )
        try:
            handle = await self._read_handle(opened, source.address)
            self._check(handle, item.num_tokens)
            result = await self._executor.pull(
                PullJob(handle, item.block_ids, item.cached_tokens, item.copies)
            )
            released = await stub.Release(
                kv_pb2.ReleaseRequest(
                    ticket=item.ticket, epoch=source.epoch, reader_epoch=self._epoch
                ),
                timeout=RPC_TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            # The source holds the blocks for us for as long as this call lives.
            opened.cancel()
        if not released.intact:
            raise FailedPreconditionError("lease: it ended before the pull did; the copy is void")
        return KvTransfer(handle.transport, result.size_bytes, result.duration_ns)

    async def close(self) -> None:
        """Closes every connection."""
        for channel in self._channels.values():
            await channel.close()

    async def _read_handle(
        self,
        opened: "grpc.aio.UnaryStreamCall[kv_pb2.OpenRequest, kv_pb2.KvHandle]",
        address: str,
    ) -> KvHandle:
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                message = await opened.read()
        except TimeoutError:
            raise UnavailableError(
                f"source: {address} did not answer within {RPC_TIMEOUT_S:g} s"
            ) from None
        if not isinstance(message, kv_pb2.KvHandle):
            raise UnavailableError(f"source: {address} ended the call")
        return handle_from_proto(message)

    def _check(self, handle: KvHandle, expected: int) -> None:
        if handle.transport != self._executor.transport:
            raise FailedPreconditionError(
                f"transport: the source offers {handle.transport!r}; "
                f"this node can use {self._executor.transport!r}"
            )
        if handle.num_tokens != expected:
            raise FailedPreconditionError(
                f"num_tokens: the source has KV of {handle.num_tokens} tokens, not {expected}"
            )

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or open_channel(address)
        self._channels[address] = channel
        if len(self._channels) > MAX_SOURCE_CHANNELS:
            await self._channels.popitem(last=False)[1].close()
        return channel
