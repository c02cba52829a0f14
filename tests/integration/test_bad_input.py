"""Bad requests get a clear error that names field and value, and nobody else notices."""

import grpc
import pytest

from splitserve.core.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
)
from splitserve.core.sampling import SamplingParams
from splitserve.rpc.channel import open_sync_channel
from splitserve.v1 import common_pb2, router_pb2, router_pb2_grpc

Sampling = common_pb2.SamplingParams
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def stub(cluster):
    with open_sync_channel(cluster.address) as channel:
        yield router_pb2_grpc.RouterStub(channel)


def refusal(stub, **fields) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(router_pb2.GenerateRequest(**fields), timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["prompt", "token_ids", "chat"]),
        ({"prompt": ""}, ["prompt"]),
        ({"token_ids": router_pb2.TokenIds()}, ["token_ids"]),
        ({"token_ids": router_pb2.TokenIds(ids=[5, 512])}, ["token_ids", "512"]),
        ({"chat": router_pb2.Chat()}, ["chat"]),
        (
            {"chat": router_pb2.Chat(messages=[{"role": "wizard", "content": "x"}])},
            ["role", "wizard", "user"],
        ),
        ({"prompt": "x", "request_id": "r" * 129}, ["request_id", "128"]),
    ],
)
def test_an_input_that_cannot_be_answered(stub, fields, names):
    message = refusal(stub, **fields)
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        (Sampling(max_tokens=0), ["max_tokens", "0"]),
        (Sampling(temperature=-1), ["temperature", "-1"]),
        (Sampling(temperature=float("nan")), ["temperature", "nan"]),
        (Sampling(top_p=0), ["top_p", "0"]),
        (Sampling(top_p=1.5), ["top_p", "1.5"]),
        (Sampling(min_p=2), ["min_p", "2"]),
        (Sampling(repetition_penalty=0), ["repetition_penalty"]),
        (Sampling(presence_penalty=3), ["presence_penalty", "3"]),
        (Sampling(logprobs=21), ["logprobs", "21", "20"]),
        (Sampling(n=129), ["n", "129", "128"]),
        (Sampling(stop=[""]), ["stop"]),
        (Sampling(stop_token_ids=[512]), ["stop_token_ids", "512"]),
    ],
)
def test_a_sampling_parameter_outside_what_is_allowed(stub, sampling, names):
    message = refusal(stub, prompt="x", sampling=sampling)
    for name in names:
        assert name in message


def test_fault_30_an_over_long_prompt_is_refused_before_any_node_is_touched(client, stub):
    before = [node.computed_tokens_total for node in client.status().nodes]
    ids = router_pb2.TokenIds(ids=[5] * 32_768)
    message = refusal(stub, token_ids=ids)
    assert "32768" in message.replace(",", "")
    assert [node.computed_tokens_total for node in client.status().nodes] == before


def test_fault_30_prompt_and_max_tokens_beyond_the_model_name_all_three_numbers(stub):
    ids = router_pb2.TokenIds(ids=[5] * 100)
    message = refusal(stub, token_ids=ids, sampling=Sampling(max_tokens=32_700))
    for number in ("100", "32700", "32768"):
        assert number in message.replace(",", "")


def test_a_megabyte_of_text_is_refused_and_stops_nobody(client, stub):
    generation = client.generate("a ferry", sampling=SamplingParams(max_tokens=400, seed=1))
    next(generation)
    assert "32768" in refusal(stub, prompt="The ferry is late. " * 55_000).replace(",", "")
    assert generation.completion().finish_reason is not None


def test_invalid_utf_8_is_refused_as_such(cluster):
    with open_sync_channel(cluster.address) as channel:
        send = channel.unary_stream("/splitserve.v1.Router/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(send(b"\x12\x02\xff\xfe", timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in caught.value.details()


def test_a_lone_surrogate_is_refused_by_the_client(client):
    with pytest.raises(InvalidArgumentError, match="prompt"):
        client.generate("\ud800")


def test_a_request_id_that_runs_cannot_be_used_again_until_it_is_done(client):
    sampling = SamplingParams(max_tokens=2000, seed=1, ignore_eos=True)
    running = client.generate("a", request_id="twice", sampling=sampling)
    next(running)
    with pytest.raises(AlreadyExistsError, match="twice"):
        client.generate("b", request_id="twice").completion()
    client.abort("twice")
    assert running.completion().finish_reason.name == "ABORTED"
    client.generate("b", request_id="twice", sampling=SamplingParams(max_tokens=2)).completion()


def test_unknown_requests_are_not_found(client):
    with pytest.raises(NotFoundError, match="nobody"):
        client.abort("nobody")
    with pytest.raises(NotFoundError, match="nobody"):
        client.lifetime("nobody")
