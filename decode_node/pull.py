"""Pulls one request's KV: open, copy, release, and believe it only if it was intact."""

import asyncio
from collections import OrderedDict
from dataclasses import replace

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
from splitserve.transfer.transport import PullJob, PullResult
from splitserve.v1 import kv_pb2, kv_pb2_grpc

MAX_SOURCE_CHANNELS = 64
"""Prefill nodes this node stays connected to; far more than pulls can run at once, so that the
one unused for longest, which goes first, is idle."""


OpenCall = grpc.aio.UnaryStreamCall[kv_pb2.OpenRequest, kv_pb2.KvHandle]


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
            result = await self._copy(item, opened)
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
        return KvTransfer(self._executor.transport, result.size_bytes, result.duration_ns)

    async def close(self) -> None:
        """Closes every connection."""
        for channel in self._channels.values():
            await channel.close()

    async def _copy(self, item: Import, opened: OpenCall) -> PullResult:
        """Copies all tokens, those of a prompt that is still computed as they come."""
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                handle = handle_from_proto(await _next(opened, item))
        except TimeoutError:
            raise UnavailableError(
                f"source: {item.source.address} did not answer within {RPC_TIMEOUT_S:g} s"
            ) from None
        done, size_bytes, duration_ns = item.cached_tokens, 0, 0
        while True:
            self._check(handle, item.num_tokens)
            if handle.num_tokens > done or not handle.growing:
                copies = () if handle.growing else item.copies
                job = PullJob(handle, item.block_ids, done, copies)
                result = await self._executor.pull(job)
                done = max(done, handle.num_tokens)
                size_bytes += result.size_bytes
                duration_ns += result.duration_ns
            if not handle.growing:
                return PullResult(size_bytes, duration_ns)
            # How long a prompt takes is its prefill node's business; a lost one ends the call.
            news = await _next(opened, item)
            handle = replace(handle, num_tokens=news.num_tokens, growing=news.growing)

    def _check(self, handle: KvHandle, expected: int) -> None:
        if handle.transport != self._executor.transport:
            raise FailedPreconditionError(
                f"transport: the source offers {handle.transport!r}; "
                f"this node can use {self._executor.transport!r}"
            )
        if handle.num_tokens > expected or (handle.num_tokens < expected and not handle.growing):
            raise FailedPreconditionError(
                f"num_tokens: the source has KV of {handle.num_tokens} tokens, not {expected}"
            )

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or open_channel(address)
        self._channels[address] = channel
        if len(self._channels) > MAX_SOURCE_CHANNELS:
            await self._channels.popitem(last=False)[1].close()
        return channel


async def _next(opened: OpenCall, item: Import) -> kv_pb2.KvHandle:
    message = await opened.read()
    if not isinstance(message, kv_pb2.KvHandle):
        raise UnavailableError(f"source: {item.source.address} ended the call")
    return message
