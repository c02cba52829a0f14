"""What reaches a client when a call fails, over a real server."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from splitserve.core.errors import (
    InternalError,
    NotFoundError,
    SplitserveError,
    UnavailableError,
    error_from_code,
)
from splitserve.rpc.channel import open_channel
from splitserve.rpc.errors import error_from_rpc
from splitserve.rpc.server import RpcServer
from splitserve.v1 import router_pb2, router_pb2_grpc


class Scripted(router_pb2_grpc.RouterServicer):
    """Fails as its test says."""

    error: Exception

    async def Abort(self, request, context):
        raise self.error

    async def Generate(self, request, context):
        yield router_pb2.GenerateResponse(text=request.prompt)
        raise self.error

    async def GetLifetime(self, request, context):
        await asyncio.sleep(60)


@pytest.fixture
async def scripted():
    return Scripted()


@pytest.fixture
async def channel(scripted):
    rpc = RpcServer(["splitserve.v1.Router"])
    address = rpc.bind("127.0.0.1:0")
    router_pb2_grpc.add_RouterServicer_to_server(scripted, rpc.server)
    await rpc.start()
    async with open_channel(address) as opened:
        opened.address, opened.rpc = address, rpc
        yield opened
    await rpc.stop(0)


async def failure(call) -> SplitserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


@pytest.mark.parametrize("cls", SplitserveError.__subclasses__())
async def test_every_error_crosses_the_wire_as_itself(channel, scripted, cls):
    scripted.error = cls("field: 3 is not allowed; allowed: 2")
    error = await failure(router_pb2_grpc.RouterStub(channel).Abort(router_pb2.AbortRequest()))
    assert type(error) is cls
    assert error.message == "field: 3 is not allowed; allowed: 2"


async def test_an_unexpected_error_tells_the_client_nothing_of_it(channel, scripted):
    scripted.error = RuntimeError("somebody else's prompt")
    error = await failure(router_pb2_grpc.RouterStub(channel).Abort(router_pb2.AbortRequest()))
    assert type(error) is InternalError
    assert "prompt" not in error.message


async def test_a_stream_that_fails_keeps_what_it_sent_and_ends_with_a_status(channel, scripted):
    scripted.error = NotFoundError("ticket: gone")
    call = router_pb2_grpc.RouterStub(channel).Generate(router_pb2.GenerateRequest(prompt="a"))
    assert (await call.read()).text == "a"
    error = await failure(call.read())
    assert type(error) is NotFoundError


async def test_invalid_utf_8_is_the_client_s_fault_and_said_so(channel):
    send = channel.unary_unary("/splitserve.v1.Router/Abort")
    error = await failure(send(b"\x0a\x02\xff\xfe"))
    assert error.code == "INVALID_ARGUMENT"
    assert "UTF-8" in error.message


async def test_the_caller_s_own_deadline_is_not_our_error(channel):
    stub = router_pb2_grpc.RouterStub(channel)
    error = await failure(stub.GetLifetime(router_pb2.GetLifetimeRequest(), timeout=0.05))
    assert error.code == "DEADLINE_EXCEEDED"


async def test_health_follows_set_serving_for_the_server_and_each_service(channel):
    stub = health_pb2_grpc.HealthStub(channel)

    async def statuses() -> set[int]:
        names = ["", "splitserve.v1.Router"]
        return {
            (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names
        }

    assert await statuses() == {health_pb2.HealthCheckResponse.NOT_SERVING}
    await channel.rpc.set_serving(True)
    assert await statuses() == {health_pb2.HealthCheckResponse.SERVING}


async def test_reflection_lists_our_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {"splitserve.v1.Router", "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_a_clear_error(channel):
    with pytest.raises(UnavailableError, match=f"{channel.address}: the port is in use"):
        RpcServer([]).bind(channel.address)


def test_an_unknown_status_is_an_internal_error():
    assert type(error_from_code("DATA_LOSS", "x")) is InternalError
