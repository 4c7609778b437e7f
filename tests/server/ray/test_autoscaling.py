"""More engines while tokens wait."""

import asyncio
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.page_groups import PageGroups
from ropewalk.server.ray.autoscale import TokenLoad, by_tokens
from tests.processes import running_server
from tests.server.ray.cluster import body, metrics_of, stream

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("loads", "wanted"), [([0.0], 1), ([0.7], 1), ([0.8], 2), ([0.9, 0.9], 3), ([9.0, 9.0], 4)]
)
def test_the_number_follows_the_sum_of_the_loads(loads: list[float], wanted: int) -> None:
    """Each replica should be used to 0.7, within the bounds."""
    context = SimpleNamespace(
        aggregated_metrics={"load": dict(enumerate(loads))},
        target_num_replicas=2,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert by_tokens(context)[0] == wanted


def test_without_numbers_the_target_stays() -> None:
    """Replicas that have just started have sent none."""
    assert by_tokens(SimpleNamespace(aggregated_metrics={}, target_num_replicas=3))[0] == 3


def test_a_load_is_a_share_of_the_cache_and_of_the_steps_that_wait() -> None:
    """A full cache is 1, and so are eight steps of prompt tokens."""
    config = EngineConfig(
        kv_cache_tokens=1024, max_model_len=256, page_size=64, max_num_batched_tokens=128
    )
    assert TokenLoad(running=[1000, 24]).share_of(config) == 1
    assert TokenLoad(waiting=8 * 128).share_of(config) == 1


def test_a_request_beyond_a_window_is_a_share_of_pages_not_of_tokens() -> None:
    """One layer of two holds its window and a step: 6 pages of each request, of 2 x 16."""
    config = EngineConfig(
        kv_cache_tokens=1024,
        max_model_len=4096,
        page_size=64,
        max_num_batched_tokens=128,
        page_groups=PageGroups(((0,), (1,)), (None, 128)),
    )
    assert TokenLoad(running=[640]).share_of(config) == (10 + 6) / 32
    assert TokenLoad(running=[64, 64]).share_of(config) == 4 / 32


@pytest.mark.long
def test_an_engine_is_added_under_load() -> None:
    """Streams that fill the cache of one engine bring a second one."""
    flags = ("--replicas", "1", "--max-replicas", "2", "--threads", "1")
    with running_server(*flags, "--kv-cache-tokens", "2048") as server:
        is_over = threading.Event()

        async def ask(client: httpx.AsyncClient, number: int) -> None:
            while not is_over.is_set():
                await stream(client, server.url, body(number, 300))

        async def load() -> None:
            async with httpx.AsyncClient(timeout=120) as client:
                await asyncio.gather(*(ask(client, number) for number in range(12)))

        loading = threading.Thread(target=lambda: asyncio.run(load()))
        loading.start()
        try:
            deadline = time.monotonic() + 200
            while metrics_of(server)["ropewalk_replicas_ready"] < 2:
                assert time.monotonic() < deadline
                time.sleep(1)
        finally:
            is_over.set()
            loading.join()
