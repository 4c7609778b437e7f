"""The /stats of several servers is that of one that has done the work of all."""

import json
from typing import Any

import pytest

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.server.metrics import MetricFactory, Metrics
from ropewalk.server.page.stats import read_stats
from ropewalk.server.router.fleet.fleet_stats import FleetStats

ADDRESSES = ("http://a:1", "http://b:1")


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


def changed(of: Metrics, **fields: float) -> bytes:
    """The answer of /stats with some other numbers."""
    return json.dumps({**stats_of(of), **fields}).encode()


def by_labels(stats: dict[str, Any]) -> dict[str, Any]:
    """The same, whatever the order of the requests; sums are rounded."""
    stats["requests"] = sorted(map(json.dumps, stats["requests"]))
    return json.loads(json.dumps(stats), parse_float=lambda text: round(float(text), 9))  # type: ignore[no-any-return]


def noted(fleet: FleetStats, address: str, of: Metrics) -> None:
    """Tell the fleet what a server answers now."""
    fleet.note(address, json.dumps(stats_of(of)).encode())


def test_counts_are_those_of_one_server_with_all_the_work() -> None:
    """Also of a server that is gone, and of one whose process was replaced."""
    fleet, whole = FleetStats(), metrics()
    for seed, address in ((1, "a"), (2, "b"), (3, "a"), (4, "c")):
        one = metrics()
        work(one, 1 + 10 // seed)
        work(whole, 1 + 10 // seed)
        noted(fleet, address, one)
    fleet.end("b")
    found, expected = json.loads(fleet.render(("a", "c"))), stats_of(whole)
    del expected["start_time_seconds"]  # there are several
    assert found.pop("kv_cache_tokens") == 2 * expected.pop("kv_cache_tokens")
    assert found.pop("kv_cache_bytes") == 2 * expected.pop("kv_cache_bytes")
    assert by_labels(found) == by_labels(expected)


def test_queue_and_cache_are_of_the_servers_that_take_requests() -> None:
    """Numbers of now are not kept."""
    fleet = FleetStats()
    for number, address in enumerate(ADDRESSES, 1):
        one = metrics()
        one.stepped(number, 10 * number, 0, 4 * number)
        noted(fleet, address, one)
    both, first = (json.loads(fleet.render(ADDRESSES[:num])) for num in (2, 1))
    assert (both["requests_running"], both["requests_waiting"]) == (3, 30)
    assert both["kv_cache_usage_ratio"] == pytest.approx(0.375)
    assert (first["requests_running"], first["kv_cache_usage_ratio"]) == (1, 0.25)
    assert (both["kv_cache_bytes"], first["kv_cache_bytes"]) == (2 * 4608, 4608)


def test_an_answer_that_was_overtaken_is_left_out() -> None:
    """It has smaller counts of the same process, and is no new one."""
    fleet, one = FleetStats(), metrics()
    fleet.note("a", changed(one, prompt_tokens=9, generated_tokens=20))
    fleet.note("a", changed(one, prompt_tokens=9, generated_tokens=19))
    fleet.note("a", changed(one, prompt_tokens=10, generated_tokens=20))
    found = json.loads(fleet.render(("a",)))
    assert (found["prompt_tokens"], found["generated_tokens"]) == (10, 20)


def test_a_new_process_counts_beside_the_old_one_even_with_larger_counts() -> None:
    """Its start tells it."""
    fleet, one = FleetStats(), metrics()
    fleet.note("a", changed(one, prompt_tokens=9, start_time_seconds=1.0))
    fleet.note("a", changed(one, prompt_tokens=10, start_time_seconds=2.0))
    assert json.loads(fleet.render(("a",)))["prompt_tokens"] == 19


def test_servers_with_other_context_buckets_are_left_out() -> None:
    """Their histograms cannot be added; the servers that take requests decide."""
    fleet, other = FleetStats(), metrics()
    config = EngineConfig(kv_cache_tokens=1024, max_model_len=256, page_size=64)
    longer = Metrics(MetricFactory(), (64, 128, 256), config, (), {"pages": 4096})
    work(other, 1)
    work(longer, 3)
    noted(fleet, "gone", other)
    fleet.end("gone")
    noted(fleet, "before", other)
    noted(fleet, "now", longer)
    found, expected = json.loads(fleet.render(("now",))), stats_of(longer)
    del expected["start_time_seconds"]
    assert by_labels(found) == by_labels(expected)


def test_another_answer_is_refused() -> None:
    """It would end the page of all."""
    with pytest.raises(ValueError, match="no answer of /stats"):
        FleetStats().note("a", b"[]")
