"""How fast is a pull over shared memory? Against memcpy of the same bytes between two segments."""

import ctypes
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.machine import Machine
from bench.report import Comparison, Report
from bench.rounds import take_turns
from splitserve.core.config import EngineConfig
from splitserve.core.ticket import new_epoch
from splitserve.kv.cache import KVCache
from splitserve.kv.handle import KvHandle, RankMemory
from splitserve.kv.layout import KVLayout
from splitserve.kv.memory import segment_name
from splitserve.model.config import ModelConfig, resolve_dtype
from splitserve.transfer.shm import TRANSPORT, ShmImporter
from splitserve.transfer.transport import PullJob

REQUEST_TOKENS = (128, 1024, 8192)
CACHE_TOKENS = 24_576
"""Of either cache: by the time a place is copied again, no processor remembers it."""

TARGET_BLOCK_SIZES = (16, 32)
COPIED_TOKENS = 16_384
"""Copied by each side in a round, in as many requests as that takes."""

RATIO = 0.8


@dataclass(frozen=True, slots=True)
class Place:
    """Where one request lies in a cache.

    Attributes:
        block_ids: In token order: scattered, as after hours of service.
        begin: Its first byte, were all requests laid out one after the other.
    """

    block_ids: tuple[int, ...]
    begin: int


class Copies:
    """Both ways to copy requests of one size from cache to cache.

    Both sides walk through the same memory in the same order, a request at a time, and neither
    comes back to a place before all others had their turn.

    Args:
        source: Filled.
        target: Of the same size.
        importer: The target's.
        tokens: Tokens in a request.
    """

    def __init__(
        self, source: KVCache, target: KVCache, importer: ShmImporter, tokens: int
    ) -> None:
        self._source, self._target = source, target
        self._tokens = tokens
        self._size_bytes = tokens * source.layout.token_bytes
        self._importer = importer
        self._places = (_places(source, tokens), _places(target, tokens))
        self._turn = 0

    async def pull(self, _: int) -> float:
        """Bytes a second of the worker's importer, planning included."""
        seconds = 0.0
        for given, taken in self._next_places():
            job = _job(self._source, given.block_ids, taken.block_ids)
            begin = time.perf_counter()
            result = self._importer.pull(job)
            seconds += time.perf_counter() - begin
            assert result.size_bytes == self._size_bytes, "all of it"
        return self._rate(seconds)

    async def memcpy(self, _: int) -> float:
        """Bytes a second of one memcpy per request."""
        seconds = 0.0
        to, from_ = self._target.raw.ctypes.data, self._source.raw.ctypes.data
        for given, taken in self._next_places():
            begin = time.perf_counter()
            ctypes.memmove(to + taken.begin, from_ + given.begin, self._size_bytes)
            seconds += time.perf_counter() - begin
        return self._rate(seconds)

    def _next_places(self) -> Iterator[tuple[Place, Place]]:
        for _ in range(COPIED_TOKENS // self._tokens):
            self._turn = (self._turn + 1) % len(self._places[0])
            yield self._places[0][self._turn], self._places[1][self._turn]

    def _rate(self, seconds: float) -> float:
        return COPIED_TOKENS // self._tokens * self._size_bytes / seconds / 1e9


async def measure(model: Path, dtype: str, threads: int, rounds: int) -> Report:
    """Answers the question."""
    machine = Machine.here("numpy")
    config = ModelConfig.from_dir(model)
    layout = _layout(config, resolve_dtype(dtype, config))
    comparisons = []
    for target_size in TARGET_BLOCK_SIZES:
        with _caches(layout, replace(layout, block_size=target_size)) as (source, target, importer):
            for tokens in REQUEST_TOKENS:
                copies = Copies(source, target, importer, tokens)
                figures = await take_turns(copies.pull, copies.memcpy, rounds)
                case = f"{tokens:,} tokens, blocks of {layout.block_size} to {target_size}"
                comparisons.append(Comparison(case, "GB/s", figures, RATIO))
    return Report(
        name="pull",
        title="a request's KV between two processes' shared memory, beside memcpy",
        peer="memcpy",
        machine=machine,
        settings={"model": config.name, "dtype": layout.dtype, "threads": 1, "rounds": rounds},
        comparisons=comparisons,
        notes={"a token's KV": f"{layout.token_bytes:,} bytes"},
    )


def _layout(config: ModelConfig, dtype: str) -> KVLayout:
    """What a worker of the whole model holds."""
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=EngineConfig.block_size,
        dtype=dtype,
        layer_begin=0,
        layer_end=config.num_layers,
        head_begin=0,
        head_end=config.num_kv_heads,
    )


@contextmanager
def _caches(source: KVLayout, target: KVLayout) -> Iterator[tuple[KVCache, KVCache, ShmImporter]]:
    """Both caches, and an importer that knows the source; all goes whatever happens."""
    epoch = new_epoch()
    with ExitStack() as stack:
        made = []
        for rank, layout in enumerate((source, target)):
            blocks = CACHE_TOKENS // layout.block_size
            made.append(KVCache.create(segment_name(epoch, rank), layout, blocks))
            stack.callback(made[-1].close)
        made[0].raw[:] = np.arange(source.head_dim, dtype=made[0].raw.dtype)
        importer = ShmImporter(made[1], 1)
        stack.callback(importer.close)
        # All of it once: a worker maps its peers' memory at first use, and keeps it mapped.
        importer.pull(_job(made[0], range(made[0].num_blocks), range(made[1].num_blocks)))
        yield made[0], made[1], importer


def _job(source: KVCache, given: Sequence[int], taken: Sequence[int]) -> PullJob:
    """What a decode node's worker is told to pull: all tokens of these blocks."""
    memory = RankMemory(source.layout, source.num_blocks, source.location)
    tokens = len(given) * source.layout.block_size
    return PullJob(KvHandle(TRANSPORT, tokens, tuple(given), (memory,)), tuple(taken))


def _places(cache: KVCache, tokens: int) -> list[Place]:
    """Every request that the cache has room for."""
    blocks = list(range(cache.num_blocks))
    random.Random(tokens).shuffle(blocks)
    count = tokens // cache.layout.block_size
    size_bytes = count * cache.layout.block_bytes
    return [
        Place(tuple(blocks[number * count : (number + 1) * count]), number * size_bytes)
        for number in range(cache.num_blocks // count)
    ]
