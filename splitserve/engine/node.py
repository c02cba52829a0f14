"""What both kinds of node do: stand up, join, serve, drain, stop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import splitserve
from splitserve.core.config import NodeConfig
from splitserve.core.errors import InternalError, invalid
from splitserve.core.node import NodeInfo, NodeStatus
from splitserve.core.ticket import new_epoch
from splitserve.engine.executor import Executor
from splitserve.engine.loop import StepLoop
from splitserve.engine.scheduler import Scheduler
from splitserve.engine.work import WorkHandler, WorkStreams
from splitserve.kv.blocks import BlockManager
from splitserve.kv.memory import sweep_stale
from splitserve.kv.prefix import PrefixCache
from splitserve.model.fingerprint import fingerprint
from splitserve.rpc.convert import node_status_to_proto
from splitserve.rpc.daemon import StopSignals, announce_ready
from splitserve.rpc.membership import Membership
from splitserve.rpc.server import RpcServer
from splitserve.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

WILDCARD_HOSTS = ("0.0.0.0", "[::]", "*")
STOP_GRACE_S = 0.5
"""How long calls may take to end once the node has drained."""


class Role(WorkHandler, Protocol):
    """What makes a node a prefill node or a decode node."""

    @property
    def scheduler(self) -> Scheduler:
        """Decides what each step computes."""

    @property
    def idle(self) -> bool:
        """Whether the node holds nothing for any router."""

    def queues(self) -> tuple[int, int, int]:
        """How many requests wait, run, and are being imported."""

    async def run(self) -> None:
        """What runs beside the step loop, until cancelled."""


class Node:
    """One node daemon, its workers up and its address taken.

    Attributes:
        config: What it was told at start.
        info: What it is.
        executor: Its workers.
        blocks: Its KV blocks.
        loop: Its step loop.
        rpc: Its server; add the role's servicers before `run`.
        work: Its routers' work streams; set by `run`'s caller through `attach`.
    """

    def __init__(
        self, config: NodeConfig, rpc: RpcServer, executor: Executor, info: NodeInfo
    ) -> None:
        self.config = config
        self.info = info
        self.executor = executor
        self.rpc = rpc
        self.blocks = BlockManager(executor.shape.num_blocks, config.engine.block_size)
        self.prefixes = PrefixCache(self.blocks, config.prefix_cache)
        self.loop = StepLoop(executor, lambda news: self.work.publish(news))
        self._serving = False
        self._drain = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: NodeConfig, services: Sequence[str], signals: StopSignals
    ) -> AsyncIterator["Node"]:
        """Takes the address, starts the workers, and stops both whatever happens.

        Raises:
            SplitserveError: The address or the model cannot be used; one clear sentence.
            StoppedError: Told to stop while the workers start.
        """
        rpc = RpcServer((*services, "splitserve.v1.NodeControl"))
        bound = rpc.bind(config.listen)
        advertise = config.advertise or bound
        if advertise.rpartition(":")[0] in WILDCARD_HOSTS:
            raise invalid("advertise", advertise, "an address that the router can dial")
        sweep_stale()
        epoch = new_epoch()
        executor = await signals.unless_told(Executor.start(config.engine, epoch))
        try:
            yield cls(config, rpc, executor, _describe(config, executor, advertise, epoch))
        finally:
            await rpc.stop(STOP_GRACE_S)
            await executor.stop()

    def attach(self, role: Role) -> WorkStreams:
        """Gives the node its role and answers the streams that feed it."""
        self.role = role
        self.work = WorkStreams(self.info, role)
        return self.work

    def status(self) -> NodeStatus:
        """Blocks and queues, now."""
        counts = self.blocks.counts
        waiting, running, importing = self.role.queues()
        return NodeStatus(
            info=self.info,
            blocks_total=counts.total,
            blocks_free=counts.free,
            blocks_cached=counts.cached,
            blocks_owned=counts.owned,
            blocks_leased=counts.leased,
            blocks_quarantined=counts.quarantined,
            waiting=waiting,
            running=running,
            importing=importing,
            computed_tokens_total=self.loop.computed_tokens_total,
            sampled_tokens_total=self.loop.sampled_tokens_total,
            cached_tokens_total=self.prefixes.hit_tokens_total,
            serving=self._serving,
        )

    def drain(self) -> None:
        """Leaves membership and stops once what runs has finished."""
        self._drain.set()

    async def run(self, signals: StopSignals) -> None:
        """Serves until told to stop.

        Raises:
            SplitserveError: A worker died, the router refused the node, or a loop failed.
        """
        node_pb2_grpc.add_NodeControlServicer_to_server(NodeControl(self), self.rpc.server)
        await self.rpc.start()
        announce_ready(f"{self.info.kind.label}-node", self.info.address)
        membership = asyncio.create_task(
            Membership(
                self.config.router, self.info, self.config.join_timeout_s, self._on_membership
            ).run()
        )
        vital = [
            membership,
            asyncio.create_task(self.loop.run(self.role.scheduler)),
            asyncio.create_task(self.role.run()),
            asyncio.create_task(self._watch_workers()),
        ]
        asked = [asyncio.create_task(event.wait()) for event in (signals.drain, self._drain)]
        try:
            await asyncio.wait([*vital, *asked], return_when=asyncio.FIRST_COMPLETED)
            _raise_first(vital)
            membership.cancel()
            await asyncio.wait([membership])
            drained = await signals.drained(
                lambda: self._finished or any(task.done() for task in vital[1:]),
                self.config.drain_timeout_s,
            )
            _raise_first(vital[1:])
            log.info("stopping", extra={"drained": drained})
        finally:
            await _cancel_all([*vital, *asked])

    @property
    def _finished(self) -> bool:
        """Nothing runs, and every router has ended its stream: nothing is on its way here."""
        return self.role.idle and self.work.idle

    async def _watch_workers(self) -> None:
        reason = await self.executor.wait_failed()
        raise InternalError(f"a worker failed: {reason}")

    async def _on_membership(self, joined: bool) -> None:
        self._serving = joined
        await self.rpc.set_serving(joined)


class NodeControl(node_pb2_grpc.NodeControlServicer):
    """What every node tells and takes from operators."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainResponse:
        """Starts to drain and answers at once."""
        self._node.drain()
        return node_pb2.DrainResponse()

    async def GetNodeStatus(
        self, request: node_pb2.GetNodeStatusRequest, context: Any
    ) -> node_pb2.NodeStatus:
        """Blocks and queues, now."""
        return node_status_to_proto(self._node.status())


def _describe(config: NodeConfig, executor: Executor, address: str, epoch: str) -> NodeInfo:
    engine = config.engine
    return NodeInfo(
        kind=config.kind,
        address=address,
        epoch=epoch,
        model=engine.model.name,
        model_fingerprint=fingerprint(
            engine.model,
            dummy_seed=engine.seed if engine.use_dummy_weights else None,
            quantization=engine.quantization,
        ),
        vocab_size=executor.shape.model.vocab_size,
        kv_dtype=executor.shape.dtype,
        block_size=engine.block_size,
        num_blocks=executor.shape.num_blocks,
        max_model_len=executor.shape.max_model_len,
        transports=(executor.transport,),
        version=splitserve.__version__,
        ranks=executor.ranks,
        prefix_cache=config.prefix_cache,
    )


def _raise_first(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error


async def _cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
