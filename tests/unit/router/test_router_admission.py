"""What is wrong with a request is said before any node hears of it."""

from typing import Any

import grpc
import pytest
from scripted_cluster import Cluster, read

from splitserve.v1 import common_pb2, router_pb2

LIMIT = 1024


def ids(count: int) -> router_pb2.TokenIds:
    return router_pb2.TokenIds(ids=[1] * count)


def chat(role: str, content: str = "hello") -> router_pb2.Chat:
    return router_pb2.Chat(messages=[router_pb2.Message(role=role, content=content)])


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "input"),
        ({"prompt": ""}, "prompt: it has no tokens"),
        ({"token_ids": ids(0)}, "token_ids: it has no tokens"),
        ({"token_ids": router_pb2.TokenIds(ids=[511, 512])}, "token_ids: 512"),
        ({"token_ids": ids(LIMIT)}, f"token_ids: {LIMIT} tokens; allowed: at most {LIMIT - 1}"),
        ({"prompt": "a b c " * 100_000}, "prompt: "),
        ({"chat": router_pb2.Chat()}, "chat.messages"),
        ({"chat": chat("robot")}, "chat.messages[0].role"),
        ({"chat": chat("user", "long text " * 10_000)}, "chat: "),
        ({"prompt": "a", "request_id": "x" * 129}, "request_id"),
        ({"prompt": "a", "request_id": "two\nlines"}, "request_id"),
        (
            {"token_ids": ids(1000), "sampling": sampling(max_tokens=25)},
            "max_tokens: 25 is not allowed; with a prompt of 1000 tokens and a limit of 1024",
        ),
        ({"prompt": "a", "sampling": sampling(max_tokens=0)}, "max_tokens"),
        ({"prompt": "a", "sampling": sampling(stop_token_ids=[512])}, "stop_token_ids: 512"),
        ({"prompt": "a", "sampling": sampling(top_p=0)}, "top_p"),
        ({"prompt": "a", "sampling": sampling(temperature=-1)}, "temperature"),
        ({"prompt": "a", "sampling": sampling(temperature=float("nan"))}, "temperature"),
        ({"prompt": "a", "sampling": sampling(n=129)}, "n: 129"),
        ({"prompt": "a", "sampling": sampling(stop=[""])}, "stop"),
        ({"prompt": "a", "sampling": sampling(logprobs=21)}, "logprobs"),
    ],
)
async def test_bad_requests_are_refused_by_name(
    cluster: Cluster, fields: dict[str, Any], says: str
) -> None:
    first, second = await cluster.prefill(), await cluster.decode(max_model_len=LIMIT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(cluster.stub.Generate(router_pb2.GenerateRequest(**fields), timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in str(caught.value.details())
    assert not first.starts
    assert not second.starts


@pytest.mark.parametrize(("prompt", "max_tokens"), [(3, 256), (1000, 24), (1023, 1)])
async def test_unset_max_tokens_is_clamped_to_what_the_context_leaves(
    cluster: Cluster, prompt: int, max_tokens: int
) -> None:
    first = await cluster.prefill()
    await cluster.decode()
    reply = await cluster.ask([1] * prompt)
    assert len(reply.token_ids) == max_tokens
    assert first.starts[0].assignment.sampling.max_tokens == max_tokens


async def test_explicit_max_tokens_may_fill_the_context(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    assert len((await cluster.ask([1] * 1000, max_tokens=24)).token_ids) == 24


async def test_a_seed_is_kept_and_drawn_only_if_unset(cluster: Cluster) -> None:
    first = await cluster.prefill()
    await cluster.decode()
    await cluster.ask(max_tokens=1, seed=0)
    await cluster.ask(max_tokens=1)
    await cluster.ask(max_tokens=1)
    seeds = [start.assignment.sampling.seed for start in first.starts]
    assert seeds[0] == 0
    assert seeds[1] != seeds[2]
