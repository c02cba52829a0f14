from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc_testing
import pytest
from scripted_router import ScriptedRouter, eventually, last, piece

from splitserve import client as client_module
from splitserve.client import Client
from splitserve.core.errors import (
    CancelledError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from splitserve.core.request import FinishReason
from splitserve.v1 import router_pb2

SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"]
METHODS = SERVICE.methods_by_name


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> grpc_testing.Channel:
    """A channel with no wire: the test answers the calls itself."""
    channel = grpc_testing.channel([SERVICE], grpc_testing.strict_real_time())
    monkeypatch.setattr(client_module, "open_sync_channel", lambda address: channel)
    return channel


def test_a_generation_yields_what_the_router_sends(channel: grpc_testing.Channel) -> None:
    generation = Client("nowhere:1").generate("hi", request_id="r1", timeout=5.0)
    _, request, call = channel.take_unary_stream(METHODS["Generate"])
    assert (request.prompt, request.request_id) == ("hi", "r1")
    call.send_response(piece("Hel", 5))
    assert next(generation).text == "Hel"
    call.send_response(last("lo", 6))
    call.terminate((), grpc.StatusCode.OK, "")
    rest = list(generation)
    assert [delta.finish_reason for delta in rest] == [FinishReason.STOP]


def test_a_failed_call_is_the_error_of_its_status(channel: grpc_testing.Channel) -> None:
    generation = Client("nowhere:1").generate("hi")
    _, _, call = channel.take_unary_stream(METHODS["Generate"])
    call.terminate((), grpc.StatusCode.UNAVAILABLE, "no decode node")
    with pytest.raises(UnavailableError, match="no decode node"):
        next(generation)


def test_an_end_without_a_finish_reason_is_a_failure(channel: grpc_testing.Channel) -> None:
    generation = Client("nowhere:1").generate("hi")
    _, _, call = channel.take_unary_stream(METHODS["Generate"])
    call.send_response(piece("half"))
    call.terminate((), grpc.StatusCode.OK, "")
    with pytest.raises(InternalError, match="without a finish reason"):
        generation.completion()


@pytest.mark.parametrize("leave", ["break", "block", "cancel"])
def test_leaving_a_generation_cancels_its_call(channel: grpc_testing.Channel, leave: str) -> None:
    client = Client("nowhere:1")
    generation = client.generate("hi")
    _, _, call = channel.take_unary_stream(METHODS["Generate"])
    call.send_response(piece("a"))
    if leave == "cancel":
        generation.cancel()
    elif leave == "block":
        with generation:
            next(generation)
    else:
        for _ in generation:
            break
        del generation
    call.cancelled()  # returns once the call is cancelled


def test_abort_of_an_unknown_request_is_not_found(channel: grpc_testing.Channel) -> None:
    client = Client("nowhere:1")
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(client.abort, "r2")
        _, request, call = channel.take_unary_unary(METHODS["Abort"])
        assert request.request_id == "r2"
        call.terminate(None, (), grpc.StatusCode.NOT_FOUND, "request_id: 'r2' is not running")
        with pytest.raises(NotFoundError, match="r2"):
            outcome.result()


def test_break_ends_the_request_on_a_real_router(router: ScriptedRouter, address: str) -> None:
    router.script = [piece("a"), "hang"]
    with Client(address) as client:
        for _ in client.generate("hi"):
            break
        eventually(lambda: router.cancelled == 1, "the call was cancelled")


def test_cancel_from_another_thread_ends_a_waiting_read(
    router: ScriptedRouter, address: str
) -> None:
    router.script = ["hang"]
    with Client(address) as client, ThreadPoolExecutor(1) as pool:
        generation = client.generate("hi")
        outcome = pool.submit(generation.completion)
        eventually(lambda: router.running == 1, "the request runs")
        generation.cancel()
        with pytest.raises(CancelledError):
            outcome.result()
        eventually(lambda: router.cancelled == 1, "the call was cancelled")
