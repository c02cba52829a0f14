"""The router question's peer: a server of one hop, which says the same and knows nothing."""

import asyncio
from typing import Any

import grpc

from bench.child import serve
from bench.relay_text import token_at
from splitserve.rpc.server import SERVER_OPTIONS
from splitserve.v1 import router_pb2, router_pb2_grpc


class BareService(router_pb2_grpc.RouterServicer):
    """Streams an answer of the length asked for, one message per token."""

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """The same messages as the router's, from nowhere."""
        for position in range(request.sampling.max_tokens):
            delta = router_pb2.GenerateResponse(
                request_id="0123456789abcdef", text=" word", token_ids=[token_at(position)]
            )
            await context.write(delta)

    def Abort(self, request: Any, context: Any) -> Any:
        """Nobody asks."""

    def GetLifetime(self, request: Any, context: Any) -> Any:
        """Nobody asks."""

    def GetStatus(self, request: Any, context: Any) -> Any:
        """Nobody asks."""


async def main() -> None:
    """Serves for as long as we are asked anything."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    router_pb2_grpc.add_RouterServicer_to_server(BareService(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    async def ask() -> str:
        return address

    try:
        await serve(ask)
    finally:
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
