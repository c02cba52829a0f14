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
from bench.overlap import PROMPT_TOKENS, after_last_chunk_s
from bench.report import Comparison, Comparisons, Report
from bench.rounds import take_turns
from splitserve import native
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

RATIO_EQUAL = 0.9
RATIO_BLOCK_SIZES = 0.8
RATIO_RANKS = 0.6
COPIED_TOKENS = 16_384
"""Copied by each side in a round, in as many requests as that takes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one request lies in a cache.

    Attributes:
        block_ids: In token order: scattered, as after hours of service.
        number: Its place, were all requests laid out one after the other.
    """

    block_ids: tuple[int, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Case:
    """Which layouts give, and which one takes.

    Attributes:
        name: For the table.
        sources: Of the ranks that give.
        target: Of the rank that takes.
        ratio: Of memcpy's speed, what is expected at least.
    """

    name: str
    sources: tuple[KVLayout, ...]
    target: KVLayout
    ratio: float


def _cases(whole: KVLayout) -> list[Case]:
    middle = -(-whole.num_kv_heads // 2)
    halves = tuple(
        replace(whole, head_begin=begin, head_end=end)
        for begin, end in ((0, middle), (middle, whole.num_kv_heads))
    )
    larger = replace(whole, block_size=2 * whole.block_size)
    sizes = f"blocks of {whole.block_size} to {larger.block_size}"
    return [
        Case("equal layouts", (whole,), whole, RATIO_EQUAL),
        Case(sizes, (whole,), larger, RATIO_BLOCK_SIZES),
        Case("tensor 2 to 1", halves, whole, RATIO_RANKS),
    ]


class Copies:
    """Both ways to copy requests of one size from cache to cache.

    Both sides walk through the same memory in the same order, a request at a time, and neither
    comes back to a place before all others had their turn.

    Args:
        sources: Filled; one cache per rank.
        target: Of the size of all of them.
        importer: The target's.
        tokens: Tokens in a request.
    """

    def __init__(
        self, sources: Sequence[KVCache], target: KVCache, importer: ShmImporter, tokens: int
    ) -> None:
        self._sources, self._target = sources, target
        self._tokens = tokens
        self._size_bytes = tokens * target.layout.token_bytes
        self._importer = importer
        self._places = (_places(sources[0], tokens), _places(target, tokens))
        self._turn = 0

    async def pull(self, _: int) -> float:
        """Bytes a second of the worker's importer, planning included."""
        seconds = 0.0
        for given, taken in self._next_places():
            job = _job(self._sources, given.block_ids, taken.block_ids)
            begin = time.perf_counter()
            result = self._importer.pull(job)
            seconds += time.perf_counter() - begin
            assert result.size_bytes == self._size_bytes, "all of it"
        return self._rate(seconds)

    async def memcpy(self, _: int) -> float:
        """Bytes a second of one memcpy per request and rank."""
        seconds = 0.0
        for given, taken in self._next_places():
            to = self._target.raw.ctypes.data + taken.number * self._size_bytes
            for source in self._sources:
                size_bytes = self._tokens * source.layout.token_bytes
                from_ = source.raw.ctypes.data + given.number * size_bytes
                begin = time.perf_counter()
                ctypes.memmove(to, from_, size_bytes)
                seconds += time.perf_counter() - begin
                to += size_bytes
        return self._rate(seconds)

    def _next_places(self) -> Iterator[tuple[Place, Place]]:
        for _ in range(COPIED_TOKENS // self._tokens):
            self._turn = (self._turn + 1) % len(self._places[0])
            yield self._places[0][self._turn], self._places[1][self._turn]

    def _rate(self, seconds: float) -> float:
        return COPIED_TOKENS // self._tokens * self._size_bytes / seconds / 1e9


async def measure(model: Path, dtype: str, rounds: int) -> Report:
    """Answers the question."""
    machine = Machine.here("numpy")
    config = ModelConfig.from_dir(model)
    layout = _layout(config, resolve_dtype(dtype, config))
    comparisons = []
    for case in _cases(layout):
        with _caches(case) as (sources, target, importer):
            for tokens in REQUEST_TOKENS:
                copies = Copies(sources, target, importer, tokens)
                figures = await take_turns(copies.pull, copies.memcpy, rounds)
                name = f"{case.name}, {tokens:,} tokens"
                comparisons.append(Comparison(name, "GB/s", figures, case.ratio))
    overlapped_s, whole_s = (
        after_last_chunk_s(model, rounds, overlapped=overlapped) for overlapped in (True, False)
    )
    return Report(
        name="pull",
        title="a request's KV between two processes' shared memory, beside memcpy",
        machine=machine,
        settings={"model": config.name, "dtype": layout.dtype, "threads": 1, "rounds": rounds},
        findings=Comparisons("memcpy", comparisons),
        notes={
            "a token's KV": f"{layout.token_bytes:,} bytes",
            "kernels": native.description(),
            f"from a prompt's last chunk to the decode batch, {PROMPT_TOKENS:,} tokens": (
                f"{overlapped_s * 1e3:.1f} ms with overlapped pull, {whole_s * 1e3:.1f} ms without"
            ),
        },
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
def _caches(case: Case) -> Iterator[tuple[list[KVCache], KVCache, ShmImporter]]:
    """All caches, and an importer that knows the sources; all goes whatever happens."""
    epoch = new_epoch()
    with ExitStack() as stack:
        made = []
        for rank, layout in enumerate((*case.sources, case.target)):
            blocks = CACHE_TOKENS // layout.block_size
            made.append(KVCache.create(segment_name(epoch, rank), layout, blocks))
            stack.callback(made[-1].close)
        *sources, target = made
        for source in sources:
            source.raw[:] = np.arange(case.target.head_dim, dtype=source.raw.dtype)
        importer = ShmImporter(target, 1)
        stack.callback(importer.close)
        # All of it once: a worker maps its peers' memory at first use, and keeps it mapped.
        importer.pull(_job(sources, range(sources[0].num_blocks), range(target.num_blocks)))
        yield sources, target, importer


def _job(sources: Sequence[KVCache], given: Sequence[int], taken: Sequence[int]) -> PullJob:
    """What a decode node's worker is told to pull: all tokens of these blocks."""
    ranks = tuple(RankMemory(one.layout, one.num_blocks, one.location) for one in sources)
    tokens = len(given) * sources[0].layout.block_size
    return PullJob(KvHandle(TRANSPORT, tokens, tuple(given), ranks), tuple(taken))


def _places(cache: KVCache, tokens: int) -> list[Place]:
    """Every request that the cache has room for."""
    blocks = list(range(cache.num_blocks))
    random.Random(tokens).shuffle(blocks)
    count = tokens // cache.layout.block_size
    return [
        Place(tuple(blocks[number * count : (number + 1) * count]), number)
        for number in range(cache.num_blocks // count)
    ]
