"""Wires a router."""

import asyncio
import logging

from router.members import Members, MembershipService
from router.model import ServedModel
from router.service import RouterService
from router.tracker import Tracker
from splitserve.core.config import RouterConfig
from splitserve.core.errors import UnavailableError
from splitserve.rpc.daemon import StopSignals, announce_ready
from splitserve.rpc.server import RpcServer
from splitserve.v1 import node_pb2_grpc, router_pb2_grpc

log = logging.getLogger(__name__)

SERVICES = ("splitserve.v1.Router", "splitserve.v1.Membership")
STOP_GRACE_S = 0.5
"""How long calls may take to end once the router has drained."""


class Router:
    """One router, its address taken.

    Attributes:
        address: Where it serves.
        members: Its nodes.
        tracker: Its requests.
    """

    def __init__(self, config: RouterConfig, model: ServedModel) -> None:
        self._rpc = RpcServer(SERVICES)
        self.address = self._rpc.bind(config.listen)
        self.members = Members(model)
        self.tracker = Tracker(config.max_queued_requests)
        self._service = RouterService(config, self.address, self.members, self.tracker)
        router_pb2_grpc.add_RouterServicer_to_server(self._service, self._rpc.server)
        node_pb2_grpc.add_MembershipServicer_to_server(
            MembershipService(self.members), self._rpc.server
        )
        self._health: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers calls; healthy once a node of each kind has joined."""
        await self._rpc.start()
        self._health = asyncio.create_task(self._publish_health())

    async def refuse(self) -> None:
        """Takes no new requests and says so to health checks."""
        self._service.refuse()
        if self._health is not None:
            self._health.cancel()
        await self._rpc.set_serving(False)

    async def stop(self) -> None:
        """Ends what still runs, every work stream and every call."""
        await self.refuse()
        self.tracker.finish_all(UnavailableError("this router is stopping"))
        # Clients hear why before the connection ends; nodes hear of it by their streams' end.
        await self.members.close()
        await self._rpc.stop(STOP_GRACE_S)

    async def _publish_health(self) -> None:
        while True:
            missing = self.members.missing
            await self._rpc.set_serving(not missing)
            # A change while we were saying so is not waited for: it has been.
            if missing == self.members.missing:
                await self.members.changed()


async def serve(config: RouterConfig, signals: StopSignals) -> None:
    """Runs the daemon until it is told to stop.

    Raises:
        SplitserveError: The model or the address cannot be used; one clear sentence.
    """
    router = Router(config, ServedModel.load(config))
    await router.start()
    try:
        announce_ready("router", router.address)
        await signals.drain.wait()
        await router.refuse()
        drained = await signals.drained(lambda: router.tracker.idle, config.drain_timeout_s)
        log.info("stopping", extra={"drained": drained})
    finally:
        await router.stop()
