"""The /stats of several servers is that of one that has done the work of all."""

import json
from collections import Counter
from typing import Any

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.kv_disk.counts import StoreCounts
from ropewalk.server.metrics import MetricFactory, Metrics
from ropewalk.server.playground.stats import read_stats
from ropewalk.server.router.fleet.fleet_stats import summed_stats


def metrics() -> Metrics:
    """The metrics of a server that has done nothing."""
    config = EngineConfig(kv_cache_tokens=1024, max_model_len=256, page_size=64)
    return Metrics(MetricFactory(), (64, 256), config, (), {"pages": 4096, "open": 512})


def work(of: Metrics, seed: int) -> None:
    """Some latencies of two deployments, and tokens."""
    for at in range(3):
        name = f"m{(seed + at) % 2}"
        of.first_tokens.observe(name, 40 * seed + at, 0.01 * seed)
        of.next_tokens.observe(name, 100 * at, 0.002 * seed)
        of._prompt_tokens.inc(seed + at)
        of._requests.labels(name, "yarn", "2", "length").inc(seed)


def stats_of(of: Metrics) -> dict[str, Any]:
    """The answer of /stats as JSON."""
    found: dict[str, Any] = read_stats(of).model_dump(mode="json")
    return found


def by_labels(stats: dict[str, Any]) -> dict[str, Any]:
    """The same, whatever the order of the requests; sums are rounded."""
    stats["requests"] = sorted(map(json.dumps, stats["requests"]))
    return json.loads(json.dumps(stats), parse_float=lambda text: round(float(text), 9))  # type: ignore[no-any-return]


def test_counts_are_those_of_one_server_with_all_the_work() -> None:
    """Cache and queue are added, too."""
    whole, parts = metrics(), []
    for number in (1, 2):
        one = metrics()
        work(one, number)
        work(whole, number)
        one.stepped(number, 10 * number, 0, 4 * number)
        parts.append(stats_of(one))
    whole.stepped(3, 30, 0, 6)  # the mean use
    found, expected = summed_stats(parts), stats_of(whole)
    del expected["start_time_seconds"]  # there are several
    for name in ("kv_cache_tokens", "kv_cache_bytes"):
        assert found.pop(name) == 2 * expected.pop(name)
    assert by_labels(found) == by_labels(expected)


def test_host_memory_of_servers_is_added() -> None:
    """Each has its own. A server without any, or of an earlier release, adds nothing."""
    config = EngineConfig(kv_cache_tokens=1024, max_model_len=256, page_size=64, kv_offload_gib=1.0)
    plain = stats_of(metrics())
    assert plain["kv_offload"] is None
    earlier = {name: value for name, value in plain.items() if name != "kv_offload"}
    found = [plain, earlier]
    for number in (1, 2):
        one = Metrics(MetricFactory(), (64, 256), config, (), {"pages": 4096})
        one.pages_stored(
            StoreCounts(memory=Counter(read=number, evicted=4), num_memory_bytes=2**number)
        )
        found.append(stats_of(one))
    assert summed_stats(found)["kv_offload"] == {"pages_read": 3, "pages_evicted": 8, "bytes": 6}
    assert "kv_offload" not in summed_stats([earlier])


def test_servers_with_other_context_buckets_are_left_out() -> None:
    """Their histograms cannot be added."""
    config = EngineConfig(kv_cache_tokens=1024, max_model_len=256, page_size=64)
    longer = stats_of(Metrics(MetricFactory(), (64, 128, 256), config, (), {"pages": 4096}))
    alike = [stats_of(metrics()) for _ in range(2)]
    assert summed_stats([longer, *alike]) == summed_stats(alike)
