"""The hand-over between a real lease table and a real puller, over gRPC, without a model."""

import asyncio
import itertools

import pytest

import decode_node.pull
from decode_node.imports import Import, Source
from decode_node.pull import Puller
from prefill_node.leases import Leases
from prefill_node.source import KvSource
from splitserve.core.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from splitserve.core.request import Request
from splitserve.core.sampling import SamplingParams
from splitserve.kv.blocks import BlockManager
from splitserve.kv.handle import RankMemory
from splitserve.kv.layout import KVLayout
from splitserve.rpc.server import RpcServer
from splitserve.transfer.transport import PullJob, PullResult
from splitserve.v1 import kv_pb2_grpc

EPOCH = "prefill-epoch"
LAYOUT = KVLayout(2, 2, 16, 4, "float32", 0, 2, 0, 2)
DEADLINE_S = 5.0


class CopyByHand:
    """Stands in for the decode node's workers: a copy takes as long as the test wants."""

    transport = "shm"

    def __init__(self) -> None:
        self.jobs: list[PullJob] = []
        self.started = asyncio.Event()
        self.may_end = asyncio.Event()

    async def pull(self, job: PullJob) -> PullResult:
        self.jobs.append(job)
        self.started.set()
        await self.may_end.wait()
        return PullResult(size_bytes=1, duration_ns=1)


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.freed = asyncio.Event()
        self.blocks = BlockManager(8, LAYOUT.block_size)
        self.leases = Leases(self.blocks, ttl_s=10.0, clock=lambda: self.now_s)
        self.released: list[str] = []
        self.copy = CopyByHand()
        self.puller = Puller("decode-epoch", self.copy)  # type: ignore[arg-type]
        memories = (RankMemory(LAYOUT, 8, "segment"),)
        self.kv_source = KvSource(
            EPOCH, "shm", memories, self.leases, lambda ticket: None, self.released.append
        )

    def lease(self, ticket: str, num_tokens: int = 8) -> Request:
        self.leases.grant(ticket, self.blocks.allocate(num_tokens // 4), num_tokens)
        return self.request(ticket, num_tokens)

    def request(self, ticket: str, num_tokens: int = 8) -> Request:
        tokens = list(range(num_tokens + 1))
        return Request(ticket, tokens, num_tokens, SamplingParams(), ticket)

    def pull(self, request: Request, epoch: str = EPOCH, address: str = "") -> "asyncio.Task":
        source = Source(address or self.address, epoch)
        item = Import([request], source, len(request.token_ids) - 1, block_ids=(5, 6))
        return asyncio.create_task(self.puller.pull(item))

    async def until_blocks(self, **counts: int) -> None:
        self.blocks.on_free = self.freed.set
        async with asyncio.timeout(DEADLINE_S):
            while any(getattr(self.blocks.counts, k) != v for k, v in counts.items()):
                self.freed.clear()
                await self.freed.wait()
        self.blocks.check()


@pytest.fixture
async def world():
    world = World()
    rpc = RpcServer([])
    world.address, world.rpc = rpc.bind("127.0.0.1:0"), rpc
    kv_pb2_grpc.add_KvSourceServicer_to_server(world.kv_source, rpc.server)
    await rpc.start()
    yield world
    world.copy.may_end.set()
    await world.puller.close()
    await rpc.stop(0)


async def test_a_pull_copies_the_leased_blocks_and_gives_them_back(world):
    request = world.lease("t")
    pulling = world.pull(request)
    await world.copy.started.wait()
    assert world.blocks.counts.leased == 2
    world.copy.may_end.set()
    transfer = await pulling
    assert transfer.transport == "shm"
    job = world.copy.jobs[0]
    assert (job.block_ids, job.handle.num_tokens) == ((5, 6), 8)
    assert job.handle.ranks == (RankMemory(LAYOUT, 8, "segment"),)
    await world.until_blocks(free=8)
    assert world.released == ["t"]


async def test_fault_03_kv_that_never_comes_ends_the_wait(world, monkeypatch):
    monkeypatch.setattr(decode_node.pull, "RPC_TIMEOUT_S", 0.1)
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent:
        with pytest.raises(UnavailableError, match="did not answer within"):
            await world.pull(world.request("t"), address=address)


async def test_fault_03_a_source_that_is_gone_ends_the_wait(world):
    await world.rpc.stop(0)
    with pytest.raises(UnavailableError):
        await world.pull(world.lease("t"))


async def test_fault_04_blocks_of_a_cancelled_lease_are_given_to_nobody_while_they_are_read(world):
    request = world.lease("t")
    pulling = world.pull(request)
    await world.copy.started.wait()
    world.leases.cancel("t")
    assert world.blocks.counts.quarantined == 2
    assert len(world.blocks.allocate(6)) == 6, "all others can be had"
    assert world.blocks.num_available == 0
    world.copy.may_end.set()
    with pytest.raises(FailedPreconditionError, match="the copy is void"):
        await pulling
    await world.until_blocks(quarantined=0, free=2)


async def test_fault_05_every_expired_lease_ends_not_only_the_first(world):
    for ticket in "abc":
        world.lease(ticket)
    world.now_s = 10.0
    assert world.leases.expire() == ["a", "b", "c"]
    assert world.blocks.num_available == 8


async def test_fault_06_a_stale_ticket_is_refused(world):
    request = world.lease("t")
    world.leases.cancel("t")
    world.lease("somebody else's")
    with pytest.raises(NotFoundError, match="its lease has ended"):
        await world.pull(request)
    assert not world.copy.jobs


async def test_fault_06_a_lease_that_expires_during_the_copy_voids_it(world):
    pulling = world.pull(world.lease("t"))
    await world.copy.started.wait()
    world.now_s = 10.0
    world.leases.expire()
    world.copy.may_end.set()
    with pytest.raises(FailedPreconditionError, match="the copy is void"):
        await pulling
    await world.until_blocks(free=8)


async def test_a_node_started_anew_honours_nothing_of_the_old_one(world):
    with pytest.raises(FailedPreconditionError, match="started anew"):
        await world.pull(world.lease("t"), epoch="an earlier one")


async def test_a_handle_of_another_length_is_refused(world):
    world.lease("t", num_tokens=8)
    with pytest.raises(FailedPreconditionError, match="KV of 8 tokens, not 4"):
        await world.pull(world.request("t", num_tokens=4))
    await world.until_blocks(leased=2)


async def test_fault_12_a_reader_that_dies_lifts_the_quarantine(world):
    pulling = world.pull(world.lease("t"))
    await world.copy.started.wait()
    world.leases.cancel("t")
    assert world.blocks.counts.quarantined == 2
    # All that is left of a dead reader is a connection that ends.
    await world.puller.close()
    await world.until_blocks(quarantined=0, free=8)
    world.copy.may_end.set()
    await asyncio.gather(pulling, return_exceptions=True)


async def test_a_failed_pull_leaves_the_lease_for_another_try(world):
    request = world.lease("t")
    pulling = world.pull(request)
    await world.copy.started.wait()
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    assert world.blocks.counts.leased == 2
    world.copy.may_end.set()
    await world.pull(request)
    await world.until_blocks(free=8)


async def test_connections_to_many_sources_are_bounded(world, monkeypatch):
    monkeypatch.setattr(decode_node.pull, "MAX_SOURCE_CHANNELS", 2)
    for port in itertools.islice(itertools.count(1), 5):
        await world.puller._channel(f"127.0.0.1:{port}")
    assert len(world.puller._channels) == 2
