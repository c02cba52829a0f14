"""Who may join a node as one of its ranks. Whole nodes: `tests/integration/test_launch.py`."""

import asyncio
import json

import pytest

from splitserve import __version__
from splitserve.core.errors import UnavailableError
from splitserve.core.launch import Launch
from splitserve.engine import launch as launch_module
from splitserve.engine.launch import CHANNELS, RankListener, listen

GREETING = {"version": __version__, "job": "a", "num_ranks": 3, "rank": 1, "pid": 7}


@pytest.fixture
def launch() -> Launch:
    with listen("127.0.0.1", 0) as free:
        return Launch(0, 3, 1, "127.0.0.1", free.getsockname()[1], "a")


async def greet(launch: Launch, line: bytes) -> tuple[str, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(launch.host, launch.port)
    writer.write(line)
    try:
        answer = await asyncio.wait_for(reader.readline(), 5)
    except ConnectionResetError:  # Hung up on before all of the line was read.
        answer = b""
    return answer.decode().strip(), writer


def greeting(channel: str, **changes) -> bytes:
    return json.dumps(GREETING | {"channel": channel} | changes).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (greeting("steps", version="0.0"), "version: rank 1 has '0.0', its node has"),
        (greeting("steps", job="b"), "job: rank 1 has 'b', its node has 'a'"),
        (greeting("steps", num_ranks=2), "num_ranks: rank 1 has 2, its node has 3"),
        (greeting("steps", rank=0), "rank 0: no such rank"),
        (greeting("steps", rank=3), "rank 3: no such rank"),
        (greeting("shell"), "rank 1: no such rank"),
        (greeting("steps", rank="1"), ""),
        (b"\x80\x04cos\nsystem\n", ""),
        (b"[]\n", ""),
        (b"[" * 1023 + b"\n", ""),
        (b"x" * 5000, ""),
    ],
)
async def test_strangers_are_turned_away(launch, line, answer):
    async with RankListener(launch) as listener:
        said, writer = await greet(launch, line)
        assert said.startswith(answer) if answer else said == ""
        writer.close()
        assert not any(rank.has(one) for rank in listener.ranks.values() for one in CHANNELS)
        # And the node still listens.
        said, writer = await greet(launch, greeting("steps"))
        assert said == "welcome"
        said, again = await greet(launch, greeting("steps"))
        assert said == "rank 1: it has joined already"
        writer.close()
        again.close()
    listener.ranks[1].close()


async def test_a_node_says_which_ranks_have_not_come(launch, monkeypatch):
    monkeypatch.setattr(launch_module, "JOIN_TIMEOUT_S", 0.5)
    async with RankListener(launch) as listener:
        writers = [(await greet(launch, greeting(one)))[1] for one in CHANNELS]
        with pytest.raises(UnavailableError, match="ranks 2 of 3 have not joined"):
            await listener.wait_joined()
        for rank in listener.ranks.values():
            rank.kill()
        assert listener.ranks[2].ended.result() == "never joined"
        for writer in writers:
            writer.close()
        assert await asyncio.wait_for(listener.ranks[1].ended, 5) == "has gone"
        listener.ranks[1].close()


async def test_a_rank_that_does_not_answer_is_given_up(launch, monkeypatch):
    monkeypatch.setattr(launch_module, "KILL_GRACE_S", 0.01)
    async with RankListener(launch) as listener:
        writers = [(await greet(launch, greeting(one)))[1] for one in CHANNELS]
        rank = listener.ranks[1]
        await asyncio.wait_for(rank.connect(), 5)
        assert rank.name == "worker process 7 on 127.0.0.1"
        rank.kill()
        assert await asyncio.wait_for(rank.ended, 5) == "did not answer"
        rank.close()
        for writer in writers:
            writer.close()


async def test_an_address_that_is_not_this_hosts_is_said(launch):
    with pytest.raises(UnavailableError, match=r"rank 0 cannot listen on 203\.0\.113\.1:1"):
        listen("203.0.113.1", 1)
