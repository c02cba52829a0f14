"""How every server of ours is set up: options, errors, health, reflection."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from splitserve.core.config import MAX_MESSAGE_BYTES
from splitserve.core.errors import UnavailableError
from splitserve.rpc.channel import KEEPALIVE_INTERVAL_MS
from splitserve.rpc.errors import ErrorInterceptor

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two daemons must not share a port by accident: the second is told.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
]


class RpcServer:
    """A gRPC server with health and reflection.

    `bind`, add servicers to ``server``, then `start`. Health says NOT_SERVING until `set_serving`.

    Attributes:
        server: The grpc.aio server.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._names = ("", *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )

    def bind(self, listen: str) -> str:
        """Takes ``host:port`` and returns the address with the port taken; call before `start`.

        Raises:
            UnavailableError: The address cannot be listened on.
        """
        try:
            port = self.server.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise UnavailableError(
                f"listen: cannot serve on {listen}: the port is in use, "
                "or the address is not one of this machine's"
            )
        return f"{listen.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        """Answers calls from here on."""
        await self.set_serving(False)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets what the standard health service answers for every service here."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, waits for running ones up to ``grace_s``, then ends them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
