"""A server of OpenAI's completions, read as it streams."""

import asyncio
import json
import shlex
import sys
from contextlib import asynccontextmanager

import pytest

from bench.child import ChildError
from bench.serving.openai_target import OpenAiTarget
from bench.serving.peer import running
from bench.serving.target import TargetError
from bench.serving.workload import PlannedRequest

REQUEST = PlannedRequest(0.0, (5, 6, 7), 3)


def choice(**more) -> dict:
    return {"choices": [{"text": "x"}], **more}


@asynccontextmanager
async def server(events: list[dict], status: str = "200 OK"):
    """Answers /models, then one completion with these events; gives its URL and what was asked."""
    asked: list[dict] = []

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = [line for line in head.lower().splitlines() if line.startswith("content-length")]
        if head.startswith("GET /v1/models "):
            body, kind = json.dumps({"data": [{"id": "a-model"}]}), "200 OK"
        else:
            asked.append(json.loads(await reader.readexactly(int(length[0].split(":")[1]))))
            body, kind = "".join(f"data: {json.dumps(event)}\n\n" for event in events), status
            body += "data: [DONE]\n\n"
        writer.write(f"HTTP/1.1 {kind}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1", asked


async def read(url: str) -> list[int]:
    async with OpenAiTarget(url) as target:
        return [tokens async for tokens in target.answer(REQUEST)]


async def test_tokens_are_counted_as_the_server_counts_them():
    events = [
        choice(usage={"completion_tokens": 1}),
        choice(usage={"completion_tokens": 3}),
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    async with server(events) as (url, asked):
        assert await read(url) == [1, 2]
    assert asked[0]["model"] == "a-model"
    assert asked[0]["prompt"] == [5, 6, 7]
    assert asked[0]["max_tokens"] == 3
    assert asked[0]["ignore_eos"] is True


async def test_a_server_that_does_not_count_sends_a_token_an_event():
    async with server([choice(), choice(), choice(usage=None)]) as (url, _):
        assert await read(url) == [1, 1, 1]


async def test_what_a_server_refuses_is_told():
    async with server([], "503 Service Unavailable") as (url, _):
        with pytest.raises(TargetError, match="503"):
            await read(url)
    async with server([{"error": {"message": "no room"}}]) as (url, _):
        with pytest.raises(TargetError, match="no room"):
            await read(url)


async def test_nobody_at_the_address_is_told():
    async with server([]) as (url, _):
        pass
    with pytest.raises(TargetError, match="/v1/models"):
        await read(url)


def test_a_peer_that_does_not_start_says_why():
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no weights')"])
    with pytest.raises(ChildError, match="no weights"), running(command, "http://127.0.0.1:9/v1"):
        pass
