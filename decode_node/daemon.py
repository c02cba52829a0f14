"""Wires a decode node."""

from decode_node.service import DecodeRole, DecodeService
from splitserve.core.config import NodeConfig
from splitserve.engine.node import Node
from splitserve.rpc.daemon import StopSignals
from splitserve.v1 import work_pb2_grpc

SERVICES = ("splitserve.v1.DecodeNode",)


async def serve(config: NodeConfig, signals: StopSignals) -> None:
    """Runs the daemon until it is told to stop or cannot go on."""
    async with Node.open(config, SERVICES, signals) as node:
        work = node.attach(DecodeRole(node))
        work_pb2_grpc.add_DecodeNodeServicer_to_server(DecodeService(work), node.rpc.server)
        await node.run(signals)
