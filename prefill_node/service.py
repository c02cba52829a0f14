"""What a prefill node does for its routers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

from prefill_node.leases import Leases
from prefill_node.scheduler import PrefillScheduler
from splitserve.engine.node import Node
from splitserve.engine.work import WorkStreams
from splitserve.rpc.convert import request_from_proto
from splitserve.v1 import work_pb2, work_pb2_grpc

log = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 1.0
"""How often leases are looked at; their time to live is the last resort, not a schedule."""


class PrefillRole:
    """Prompts in, leases out.

    Attributes:
        leases: The node's leases.
        scheduler: The node's scheduler.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        node.blocks.on_free = node.loop.wake
        self.leases = Leases(node.blocks, node.config.lease_ttl_s)
        self.scheduler = PrefillScheduler(
            node.config,
            node.blocks,
            node.prefixes,
            self.leases,
            node.executor.shape.model.eos_token_ids,
        )

    @property
    def idle(self) -> bool:
        """Whether no prompt runs or waits and no KV is leased."""
        return not any(self.queues()) and not self.leases

    def queues(self) -> tuple[int, int, int]:
        """How many prompts wait and run; none is ever imported."""
        return self.scheduler.num_waiting, self.scheduler.num_running, 0

    def start(self, command: work_pb2.PrefillStart) -> None:
        """Queues a prompt."""
        self.scheduler.add(request_from_proto(command.assignment))
        self._node.loop.wake()

    def cancel(self, ticket: str, indexes: Collection[int]) -> None:
        """Drops a prompt or its lease."""
        self.scheduler.finish((ticket, min(indexes)))
        self.leases.cancel(ticket)

    def renew(self, tickets: Iterable[str]) -> None:
        """Keeps leases alive."""
        self.leases.renew(tickets)

    def first_tokens(self, command: Any) -> None:
        """Prefill nodes sample these themselves."""

    async def run(self) -> None:
        """Ends leases that nobody renews."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            for ticket in self.leases.expire():
                self._node.work.forget(ticket)
                log.warning("a lease expired that its router neither used nor ended")


class PrefillService(work_pb2_grpc.PrefillNodeServicer):
    """The routers' work streams."""

    def __init__(self, work: WorkStreams) -> None:
        self._work = work

    async def Work(  # type: ignore[override]
        self, commands: AsyncIterator[work_pb2.PrefillCommand], context: Any
    ) -> None:
        """One router's stream."""
        await self._work.serve(commands, context)
