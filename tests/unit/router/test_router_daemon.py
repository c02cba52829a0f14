"""The router as a process: what it says, what it never loads, and how it stops."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from scripted_cluster import Cluster, read
from scripted_node import Behaviour, ScriptedNode, decode, prefill, until
from tiny_model import write_tiny_model

from splitserve.core.node import NodeKind
from splitserve.model.fingerprint import architecture_fingerprint
from splitserve.rpc.channel import open_channel
from splitserve.v1 import common_pb2, router_pb2, router_pb2_grpc

MAX_RSS_BYTES = 120 * 2**20
START = (sys.executable, "-m", "router.cli", "start")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@asynccontextmanager
async def running(model: Path, *options: str) -> AsyncIterator[tuple[Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *START, "--model", str(model), "--listen", "127.0.0.1:0", *options, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("router ready on 127.0.0.1:")
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def nodes(model: Path, address: str, decodes: Behaviour) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        for kind, behave in [(NodeKind.PREFILL, prefill), (NodeKind.DECODE, decodes)]:
            node = ScriptedNode(
                kind, behave, model_fingerprint=f"{architecture_fingerprint(model)}-weights"
            )
            stack.push_async_callback(node.stop)
            await node.start(address)
            assert node.join_error is None
        channel = await stack.enter_async_context(open_channel(address))
        yield node, router_pb2_grpc.RouterStub(channel)


def request(max_tokens: int) -> router_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
    return router_pb2.GenerateRequest(prompt="The ferry", sampling=sampling)


async def test_it_serves_without_torch_in_little_memory_and_stops_clean(model: Path) -> None:
    async with running(model) as (process, address):
        async with nodes(model, address, decode) as (_, stub):
            reply = await read(stub.Generate(request(5), timeout=20))
            assert len(reply.token_ids) == 5
        mapped = {Path(entry.path).name for entry in psutil.Process(process.pid).memory_maps()}
        assert not [name for name in mapped if "torch" in name]
        assert psutil.Process(process.pid).memory_info().rss < MAX_RSS_BYTES
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0


def test_no_module_of_the_router_imports_torch_or_transformers() -> None:
    script = (
        "import sys, router.cli;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script]) == 0


async def test_sigterm_refuses_new_requests_and_finishes_what_runs(model: Path) -> None:
    async with (
        running(model) as (process, address),
        nodes(model, address, lambda node, start: decode(node, start, steps=2)) as (node, stub),
    ):
        call = stub.Generate(request(10), timeout=20)
        await call.read()
        await until(lambda: node.starts)
        process.send_signal(signal.SIGTERM)
        await refused(stub)
        node.behave = decode
        rest = node.starts[0]
        rest.assignment.token_ids.extend(range(10, 12))
        decode(node, rest)
        reply = await read(call)
        assert reply.last.finish_reason == 2
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def refused(stub: Any) -> None:
    async with asyncio.timeout(10):
        while (error := await attempt(stub)) is None:
            pass
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in str(error.details())


async def attempt(stub: Any) -> grpc.aio.AioRpcError | None:
    try:
        await read(stub.Generate(request(1), timeout=20))
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_a_second_signal_stops_now_and_clients_hear_why(model: Path) -> None:
    async with (
        running(model) as (process, address),
        nodes(model, address, lambda node, start: decode(node, start, steps=2)) as (node, stub),
    ):
        call = stub.Generate(request(10), timeout=20)
        await call.read()
        await until(lambda: node.starts)
        process.send_signal(signal.SIGINT)
        await refused(stub)
        process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError, match="stopping") as caught:
            await read(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(10):
            assert await process.wait() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--listen", "nonsense"], "listen: 'nonsense'"),
        (["--max-retries", "-1"], "max_retries: -1"),
        (["--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
async def test_what_it_cannot_start_with_is_one_clear_line(
    model: Path, options: list[str], says: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        *START, "--model", str(model), "--listen", "127.0.0.1:0", *options,
        stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert out == b""
    [line] = err.decode().splitlines()
    assert line.startswith("router: ")
    assert says in line


async def test_an_answer_that_nobody_reads_does_not_live_for_ever(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.service.CLIENT_STALL_TIMEOUT_S", 0.2)
    text = [common_pb2.TopLogprob(token_id=n) for n in range(20)]

    def flood(node: ScriptedNode, start: Any) -> None:
        ticket = start.assignment.ticket
        entries = [common_pb2.TokenLogprob(token_id=10, top=text)] * 500
        for _ in range(100):
            node.tell(ticket, [10] * 500, logprobs=entries)
        node.tell(ticket, [10], logprobs=entries[:1], finish_reason=2)

    await cluster.prefill()
    await cluster.decode(flood)
    window = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    channel = grpc.aio.insecure_channel(cluster.router.address, options=window)
    message = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=[1]),
        sampling=common_pb2.SamplingParams(max_tokens=900, logprobs=20),
    )
    call: Any = router_pb2_grpc.RouterStub(channel).Generate(message)
    await call.read()
    await until(lambda: cluster.router.tracker.idle)
    call.cancel()
    await channel.close()
