"""More servers while tokens wait."""

import asyncio
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.server.metrics import MetricFactory, Metrics
from ropewalk.server.ray.autoscale import by_tokens, load_of
from tests.server.ray.cluster import body, stream
from tests.servers.metrics import samples_of, total
from tests.servers.processes import running_server

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
    factory = MetricFactory()
    config = EngineConfig(
        kv_cache_tokens=1024, max_model_len=256, page_size=64, max_num_batched_tokens=128
    )
    metrics = Metrics(factory, (256,), config, (), {"pages": 4096})
    for num_waiting_tokens, num_pages, load in (
        (0, 0, 0),
        (0, 16, 1),
        (8 * 128, 0, 1),
        (64, 8, 0.5625),
    ):
        metrics.stepped(0, 0, num_waiting_tokens, num_pages)
        assert load_of(metrics.render(), 128) == load


@pytest.mark.long
def test_a_server_is_added_under_load() -> None:
    """Streams that fill the cache of one server bring a second one."""
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
            while total(samples_of(server), "ropewalk_router_servers", state="ready") < 2:
                assert time.monotonic() < deadline
                time.sleep(1)
        finally:
            is_over.set()
            loading.join()
