"""The memory of the cache's pages."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache


def resident_bytes() -> int:
    """The memory that this process has."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_take_memory_when_they_are_written(dtype: torch.dtype) -> None:
    """A server starts without writing its whole cache, and pages begin as zeros."""
    before = resident_bytes()
    layer: Any = SimpleNamespace(num_key_heads=8, key_dim=64, value_dim=64)
    layout = CacheLayout({0: layer}, dtype, 16)
    cache = KVCache(layout, 16_384, torch.device("cpu"), row_keys=False)
    assert cache.num_bytes >= 512 << 20
    assert resident_bytes() - before < cache.num_bytes / 8
    for pages in cache.page_bytes():
        assert pages.data_ptr() % 64 == 0
        assert not pages[::4096].any()
