"""Who may join a node as one of its ranks. Whole nodes: `tests/integration/test_launch.py`."""

import asyncio
import json

import pytest

from splitserve import __version__
from splitserve.core.errors import UnavailableError
from splitserve.core.launch import Launch
from splitserve.engine import launch as launch_module
from splitserve.engine.greeting import CHANNELS
from splitserve.engine.launch import RankListener, join_ranks, listen

GREETING = {"version": __version__, "job": "a", "num_ranks": 3, "rank": 1, "pid": 7}


@pytest.fixture
def launch() -> Launch:
    with listen("127.0.0.1", 0, "a test") as free:
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
        # And the node still listens.
        for writer in await join(launch):
            writer.close()
    listener.ranks[1].close()


async def join(launch: Launch, channels=CHANNELS, **changes) -> list[asyncio.StreamWriter]:
    """A rank's connections."""
    writers = []
    for channel in channels:
        said, writer = await greet(launch, greeting(channel, **changes))
        assert said == "welcome"
        writers.append(writer)
    return writers


async def test_a_node_says_which_ranks_have_not_come(launch, monkeypatch):
    monkeypatch.setattr(launch_module, "JOIN_TIMEOUT_S", 0.5)
    joining = asyncio.create_task(join_ranks(launch))
    await asyncio.sleep(0)
    writers = await join(launch)
    with pytest.raises(UnavailableError, match="ranks 2 of 3 have not joined"):
        await joining
    for writer in writers:
        writer.close()


async def test_a_rank_is_one_process_and_joins_once(launch):
    async with RankListener(launch) as listener:
        said, writer = await greet(launch, greeting("pulls"))
        assert said == "rank 1: 'pulls': its next connection is 'steps'"
        said, writer = await greet(launch, greeting("steps"))
        assert said == "welcome"
        said, _ = await greet(launch, greeting("pulls", pid=9))
        assert said == "rank 1: process 7 is joining as it, not 9"
        writer.close()
        writers = await join(launch)
        said, _ = await greet(launch, greeting("steps", pid=9))
        assert said == "rank 1: it has joined already"
        for writer in writers:
            writer.close()
    listener.ranks[1].close()


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_rank_that_leaves_before_all_have_come_may_come_back(launch, count):
    joining = asyncio.create_task(join_ranks(launch))
    await asyncio.sleep(0)
    for writer in await join(launch, CHANNELS[:count]):
        writer.close()
        await writer.wait_closed()
    again = await join(launch, pid=9)
    others = await join(launch, rank=2)
    ranks = await asyncio.wait_for(joining, 5)
    await ranks[1].connect()
    assert ranks[1].name == "worker process 9 on 127.0.0.1"
    for writer in again + others:
        writer.close()
    assert await asyncio.wait_for(ranks[1].ended, 5) == "has gone"
    for rank in ranks.values():
        rank.close()


async def test_a_failure_to_accept_ends_nothing(launch, monkeypatch):
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(24, "Too many open files")]

    async def fails_once(listener):
        if failures:
            raise failures.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", fails_once)
    monkeypatch.setattr(launch_module, "JOIN_RETRY_S", 0.01)
    async with RankListener(launch) as listener:
        for writer in await join(launch):
            writer.close()
    assert not failures
    listener.ranks[1].close()


async def test_a_rank_that_does_not_answer_is_given_up(launch, monkeypatch):
    monkeypatch.setattr(launch_module, "KILL_GRACE_S", 0.01)
    async with RankListener(launch) as listener:
        writers = await join(launch)
        rank = listener.ranks[1]
        await rank.connect()
        rank.kill()
        assert await asyncio.wait_for(rank.ended, 5) == "did not answer"
        rank.close()
        for writer in writers:
            writer.close()


async def test_an_address_that_is_not_this_hosts_is_said(launch):
    with pytest.raises(UnavailableError, match=r"a test: cannot listen on 203\.0\.113\.1:1 \(Can"):
        listen("203.0.113.1", 1, "a test")
