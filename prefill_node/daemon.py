"""Wires a prefill node."""

from prefill_node.service import PrefillRole, PrefillService
from prefill_node.source import KvSource
from splitserve.core.config import NodeConfig
from splitserve.engine.node import Node
from splitserve.rpc.daemon import StopSignals
from splitserve.v1 import kv_pb2_grpc, work_pb2_grpc

SERVICES = ("splitserve.v1.PrefillNode", "splitserve.v1.KvSource")


async def serve(config: NodeConfig, signals: StopSignals) -> None:
    """Runs the daemon until it is told to stop or cannot go on."""
    async with Node.open(config, SERVICES, signals) as node:
        role = PrefillRole(node)
        work = node.attach(role)
        source = KvSource(
            node.info.epoch,
            node.executor.transport,
            node.executor.memories,
            role.leases,
            role.scheduler.lease_early,
            work.forget,
        )
        work_pb2_grpc.add_PrefillNodeServicer_to_server(PrefillService(work), node.rpc.server)
        kv_pb2_grpc.add_KvSourceServicer_to_server(source, node.rpc.server)
        await node.run(signals)
