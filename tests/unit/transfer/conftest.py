from collections.abc import Callable, Iterator

import pytest

from splitserve.core.ticket import new_epoch
from splitserve.kv.cache import KVCache
from splitserve.kv.layout import KVLayout
from splitserve.kv.memory import SEGMENT_DIR, segment_name


@pytest.fixture
def make_cache() -> Iterator[Callable[[KVLayout, int], KVCache]]:
    """Makes caches of zeros; none outlives the test."""
    caches: list[KVCache] = []

    def make(layout: KVLayout, num_blocks: int) -> KVCache:
        cache = KVCache.create(segment_name(new_epoch(), 0), layout, num_blocks)
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.close()
        assert not (SEGMENT_DIR / cache.location).exists()
