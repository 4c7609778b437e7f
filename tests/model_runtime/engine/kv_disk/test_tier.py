"""A tier over a pool of a few pages, without an engine and threads."""

import time
from types import SimpleNamespace
from typing import Any

from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers
from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.reader import Fetch, Reader
from ropewalk.model_runtime.engine.kv_disk.tier import DiskTier
from ropewalk.model_runtime.scheduling.page_pool import PagePool
from ropewalk.model_runtime.scheduling.prefix_cache import PrefixIndex

KEYS = [bytes([number]) * 32 for number in range(6)]


class Waiting:
    """What the tier sets in a sequence that waits."""

    not_on_disk: bytes | None = None


class Bench:
    """The tier, its pool, and fetches whose pages have arrived."""

    def __init__(self, num_pages: int) -> None:
        self.index = PrefixIndex()
        self.pool = PagePool(num_pages, self.index)
        self.buffers = Buffers(64, 8)
        counting = Counting()
        memory: Any = SimpleNamespace(num_bytes=64, copy_in=lambda *_: None)
        self.reader = Reader(self.buffers, counting, lambda _: None)
        self.tier = DiskTier(memory, SimpleNamespace(), self.reader, counting)  # type: ignore[arg-type]
        pages: Any = SimpleNamespace(index=self.index, pool=self.pool, page_size=16)
        self.tier._pages = pages

    def cached(self, key: bytes) -> None:
        """Cache a page that no sequence uses."""
        (page,) = self.pool.allocate(1)
        self.index.publish(page, key)
        self.pool.release([page])

    def fetch(self, keys: list[bytes], num_arrived: int) -> Fetch:
        """Let a sequence wait for these pages."""
        fetch = Fetch(keys, 0, time.monotonic() + 1000, [], 0)
        for _ in range(num_arrived):
            buffer = self.buffers.take()
            assert buffer is not None
            fetch.arrived.append(buffer)
        kept: Any = self.tier._fetches
        kept[Waiting()] = fetch
        return fetch


def test_a_cached_page_that_arrives_again_takes_one_of_the_spare_pages() -> None:
    """Holding it makes it unavailable, so a third page must not be allocated."""
    bench = Bench(2)
    bench.cached(KEYS[0])
    bench.fetch(KEYS[:3], 3)
    bench.tier.collect(bench.pool.num_available, is_busy=False)
    assert bench.pool.num_available == 2  # the fetch ended for want of pages
    assert not bench.tier.held()
    bench.pool.check_integrity()
    assert [bench.index.page_of(key) is not None for key in KEYS[:3]] == [True, True, False]
