"""A node's membership in a router: joins, stays, and joins again by itself."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import grpc

from splitserve.core.config import JOIN_RETRY_S
from splitserve.core.errors import UnavailableError
from splitserve.core.node import NodeInfo
from splitserve.rpc.channel import open_channel
from splitserve.rpc.convert import node_info_to_proto
from splitserve.rpc.errors import error_from_rpc
from splitserve.v1 import node_pb2_grpc

log = logging.getLogger(__name__)


class Membership:
    """Keeps a node joined to a router for as long as `run` runs.

    Args:
        router: ``host:port`` of the router.
        info: What the node is.
        join_timeout_s: How long the router may be out of reach before the node gives up.
        on_change: Called with True once joined and with False once not any more.
    """

    def __init__(
        self,
        router: str,
        info: NodeInfo,
        join_timeout_s: float,
        on_change: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._router = router
        self._info = info
        self._join_timeout_s = join_timeout_s
        self._on_change = on_change
        self._seen_s = 0.0
        self._pause_s = JOIN_RETRY_S[0]

    async def run(self) -> None:
        """Joins, and joins again whenever the membership ends; cancel it to leave.

        Raises:
            UnavailableError: The router was out of reach for ``join_timeout_s``.
            SplitserveError: The router refused this node; trying again would not help.
        """
        self._seen_s = time.monotonic()
        async with open_channel(self._router) as channel:
            stub = node_pb2_grpc.MembershipStub(channel)
            while True:
                reason = await self._join(stub)
                if time.monotonic() - self._seen_s > self._join_timeout_s:
                    raise UnavailableError(
                        f"router: {self._router} not reached within {self._join_timeout_s:g} s"
                    )
                log.info("waiting for the router", extra={"router": self._router, "reason": reason})
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, JOIN_RETRY_S[1])

    async def _join(self, stub: "node_pb2_grpc.MembershipAsyncStub") -> str:
        """Is a member until the call ends; returns why it ended."""
        call = stub.Join(node_info_to_proto(self._info))
        joined = False
        try:
            async for event in call:
                if event.HasField("joined"):
                    joined = True
                    self._pause_s = JOIN_RETRY_S[0]
                    log.info(
                        "joined",
                        extra={"router": self._router, "transport": event.joined.transport},
                    )
                    await self._on_change(True)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if error.code in _FINAL_CODES:
                raise error from None
            return error.message
        finally:
            call.cancel()
            if joined:
                self._seen_s = time.monotonic()
                await self._on_change(False)
        return "the router ended the membership"


_FINAL_CODES = frozenset({"FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNAUTHENTICATED"})
