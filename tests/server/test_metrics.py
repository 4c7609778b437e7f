"""/metrics counts requests by the length of their context; a closed connection frees pages."""

import bisect
import json
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ropewalk.server.metrics import MetricFactory
from ropewalk.server.startup.planning.serving_plan import MAX_CONTEXT_BUCKETS, context_buckets
from tests.doubles.waiting import wait_until
from tests.servers.processes import (
    Server,
    running_server,
)

BOUNDS = [16, 32, 64, 128, 256, 512, 1024, 2048]
# (prompt tokens, tokens to generate)
SENT = [(10, 5), (10, 10), (200, 3), (250, 20), (256, 1), (257, 4), (600, 7), (1200, 2), (2047, 2)]


@pytest.fixture(scope="module")
def fresh() -> Iterator[Server]:
    """A server that only this file uses."""
    with running_server() as running:
        yield running


def samples(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value."""
    page = httpx.get(f"{server.url}/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(server: Server, name: str, **labels: str) -> float:
    """One sample; 0 if there is no such series yet."""
    return samples(server).get(("ropewalk_" + name, tuple(sorted(labels.items()))), 0.0)


def bucket(context_len: int) -> str:
    """The label of a length."""
    return str([*BOUNDS, "+Inf"][bisect.bisect_left(BOUNDS, context_len)])


def test_histograms_count_what_was_sent(fresh: Server) -> None:
    """First tokens and ends count once per request, gaps once per further token."""
    before = samples(fresh)
    for num_prompt, max_tokens in SENT:
        answer = httpx.post(
            f"{fresh.url}/v1/completions",
            json={"prompt": [7] * num_prompt, "max_tokens": max_tokens, "ignore_eos": True},
            timeout=60,
        )
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
    after = samples(fresh)
    expected: dict[tuple[str, str], int] = {}

    def expect(name: str, context_len: int) -> None:
        key = (f"ropewalk_{name}_count", bucket(context_len))
        expected[key] = expected.get(key, 0) + 1

    for num_prompt, max_tokens in SENT:
        for name in ("time_to_first_token", "request_queue", "request_prefill"):
            expect(f"{name}_seconds", num_prompt)
        expect("e2e_request_latency_seconds", num_prompt + max_tokens)
        for generated in range(2, max_tokens + 1):
            expect("inter_token_latency_seconds", num_prompt + generated)
    counted = {
        (name, dict(labels)["context_bucket"]): int(count - before.get((name, labels), 0))
        for (name, labels), count in after.items()
        if name.endswith("_count") and ("model_name", "ropewalk-demo") in labels
    }
    assert {key: count for key, count in counted.items() if count} == expected
    assert sum(count for (name, _), count in counted.items() if "first_token" in name) == len(SENT)
    gaps = sum(max_tokens - 1 for _, max_tokens in SENT)
    assert sum(count for (name, _), count in counted.items() if "inter_token" in name) == gaps


def test_requests_are_counted_by_what_was_applied(fresh: Server) -> None:
    """The labels are the deployment, the method, the factor and the finish reason."""
    labels = {"model_name": "ropewalk-demo", "finish_reason": "length"}
    before = samples(fresh)
    bodies = [
        ({"prompt": [7] * 20}, "default", "1"),
        ({"prompt": [7] * 300}, "yarn", "2"),
        ({"prompt": [7] * 20, "rope": {"rope_type": "linear", "factor": 3}}, "linear", "4"),
        ({"prompt": [7] * 2000, "rope": {"rope_type": "default"}}, "default", "1"),
    ]
    for body, _, _ in bodies:
        httpx.post(
            f"{fresh.url}/v1/completions",
            json={**body, "max_tokens": 2, "ignore_eos": True},
            timeout=60,
        ).raise_for_status()
    after = samples(fresh)
    for rope_type, factor, count in (("default", "1", 2), ("yarn", "2", 1), ("linear", "4", 1)):
        key = tuple(sorted({**labels, "rope_type": rope_type, "factor": factor}.items()))
        name = "ropewalk_requests_total"
        assert after[name, key] - before.get((name, key), 0) == count
    tokens = "ropewalk_prompt_tokens_total", ()
    assert after[tokens] - before[tokens] == 2340
    tokens = "ropewalk_generated_tokens_total", ()
    assert after[tokens] - before[tokens] == 8


def test_cached_tokens_and_rescales_are_counted(fresh: Server) -> None:
    """The same request under `grow` runs twice, and the second finds the prefix."""
    before = samples(fresh)
    body = {"prompt": [11] * 200, "max_tokens": 100, "ignore_eos": True}
    for _ in range(2):
        httpx.post(
            f"{fresh.url}/v1/completions", json={**body, "rope": {"policy": "grow"}}, timeout=60
        ).raise_for_status()
    after = samples(fresh)
    cached = "ropewalk_prompt_tokens_cached_total", ()
    assert after[cached] - before[cached] == 192
    hits = "ropewalk_prefix_cache_hits_total", ()
    assert after[hits] - before[hits] == 1
    labels = (("model_name", "ropewalk-demo"), ("policy", "grow"))
    rescales = "ropewalk_rope_rescales_total", labels
    assert after[rescales] - before.get(rescales, 0) == 2
    assert ("ropewalk_preemptions_total", ()) in after


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": [7] * 3000}, "context_length_exceeded"),
        ({"prompt": "a", "model": "x"}, "model_not_found"),
        ({"prompt": [7777]}, "invalid"),
        ({"prompt": {}}, "invalid"),
    ],
)
def test_refusals_are_counted_by_reason(fresh: Server, body: dict[str, Any], reason: str) -> None:
    """The reasons are the server's own words; a body that fails the schema has one too."""
    before = samples(fresh)
    assert httpx.post(f"{fresh.url}/v1/completions", json=body).status_code in (400, 404)
    after = samples(fresh)
    name = "ropewalk_requests_rejected_total"
    grown = {
        dict(labels)["reason"]: count - before[each, labels]
        for (each, labels), count in after.items()
        if each == name and count != before[each, labels]
    }
    assert grown == {reason: 1}


def test_http_requests_are_counted_by_route_template_and_status(fresh: Server) -> None:
    """An unknown path counts as `other`, so its text never becomes a label."""

    def count(method: str, route: str, status: str) -> float:
        labels = (("method", method), ("route", route), ("status", status))
        return samples(fresh).get(("ropewalk_http_requests_total", labels), 0.0)

    calls = [
        ("GET", "/health", "200", "/health"),
        ("GET", "/v1/models/ropewalk-demo", "200", "/v1/models/{name:path}"),
        ("GET", "/v1/models/no/such", "404", "/v1/models/{name:path}"),
        ("POST", "/v1/completions", "400", "/v1/completions"),
        ("GET", "/no-such-route", "404", "other"),
        ("BREW", "/health", "405", "/health"),
    ]
    for method, path, status, route in calls:
        label = "other" if method == "BREW" else method
        before = count(label, route, status)
        answer = httpx.request(method, fresh.url + path)
        assert str(answer.status_code) == status
        assert count(label, route, status) == before + 1
    page = httpx.get(f"{fresh.url}/metrics").text
    assert "no-such-route" not in page
    assert "no/such" not in page
    assert value(fresh, "http_request_duration_seconds_count", route="/health") > 0


def test_steps_are_timed_by_part(fresh: Server) -> None:
    """A request alone takes at most one step per token, and every part takes some time."""
    parts = ("schedule", "build", "forward", "sample", "detokenize", "deliver")
    name = "ropewalk_step_seconds_total"
    before = samples(fresh)
    assert {dict(labels)["part"] for each, labels in before if each == name} == set(parts)
    began = time.monotonic()
    httpx.post(
        f"{fresh.url}/v1/completions",
        json={"prompt": list(range(7, 27)), "max_tokens": 6, "ignore_eos": True},
        timeout=60,
    ).raise_for_status()
    after = samples(fresh)
    steps = "ropewalk_steps_total", ()
    assert 1 < after[steps] - before[steps] <= 6  # drafts save some
    taken = {
        part: after[name, (("part", part),)] - before[name, (("part", part),)] for part in parts
    }
    assert min(taken.values()) > 0
    assert sum(taken.values()) < time.monotonic() - began


def test_the_build_and_the_size_of_the_cache_are_told(fresh: Server) -> None:
    """The build and the size of the cache are gauges."""
    told = httpx.get(f"{fresh.url}/version").json()
    build = {"version": told["version"], "commit": told["commit"] or "unknown"}
    assert value(fresh, "build_info", **build) == 1
    assert value(fresh, "kv_cache_tokens") == value(fresh, "kv_cache_positions") == 65536
    assert ("process_resident_memory_bytes", ()) in samples(fresh)


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_its_pages(fresh: Server, stream: bool) -> None:  # noqa: FBT001
    """A closed connection frees its pages, whether the answer is streamed or not."""
    labels = {"model_name": "ropewalk-demo", "rope_type": "yarn", "factor": "8"}
    body = {
        "prompt": [7] * 300,
        "max_tokens": 1700,
        "rope": {"policy": "fixed"},
        "ignore_eos": True,
        "stream": stream,
        "temperature": 2,  # drafts would make the answer short
        "seed": 1,
    }

    aborted = value(fresh, "requests_total", finish_reason="abort", **labels)
    url = httpx.URL(fresh.url)
    with closing(HTTPConnection(url.host, url.port, timeout=60)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        wait_until(lambda: value(fresh, "requests_running") > 0, "it runs")
        if stream:
            assert connection.getresponse().status == 200
            assert value(fresh, "kv_cache_usage_ratio") > 0
    wait_until(lambda: value(fresh, "requests_running") == 0, "it has ended")
    assert value(fresh, "kv_cache_usage_ratio") == 0
    assert value(fresh, "requests_total", finish_reason="abort", **labels) == aborted + 1


def test_monitoring_may_ask_for_heads_alone(server: Server) -> None:
    """HEAD has the status and type of GET, and no body."""
    for path in ("/metrics", "/health", "/live", "/ready"):
        head, whole = httpx.head(server.url + path), httpx.get(server.url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize(
    ("native_len", "max_len", "expected"),
    [
        (256, 2048, BOUNDS),
        (32_768, 131_072, [2**power for power in range(8, 18)]),
        (4096, 4096 * 64, [2**power for power in range(8, 19)]),
        (100, 250, [25, 50, 100, 200, 400]),
    ],
)
def test_default_buckets_have_fractions_and_multiples_of_the_trained_length(
    native_len: int, max_len: int, expected: list[int]
) -> None:
    """There are at most twelve with +Inf, and the last holds the longest context."""
    found = context_buckets(native_len, max_len)
    assert list(found) == expected
    assert len(found) < MAX_CONTEXT_BUCKETS
    assert found[-1] >= max_len


def test_times_by_context_are_rendered_as_the_client_librarys_own() -> None:
    """Bounds are inclusive, and there is no series without observations."""
    bounds, contexts = (0.001, 0.5, 2.5, 80), [16, 64]
    factory, registry = MetricFactory(), CollectorRegistry()
    ours = factory.by_context("time_seconds", "Text.", bounds, contexts)
    theirs = Histogram(
        "time_seconds", "Text.", ["model_name", "context_bucket"], buckets=bounds, registry=registry
    )
    assert generate_latest(factory.registry) == generate_latest(registry)
    observed = [(16, 0.5), (17, 0.0001), (17, 0.001), (64, 3.0), (1000, 80.0), (1000, 81.0)]
    for context_len, seconds in observed:
        label = "16" if context_len <= 16 else "64" if context_len <= 64 else "+Inf"
        for model_name, taken in (("a", seconds), ("b", 2 * seconds)):
            ours.observe(model_name, context_len, taken)
            theirs.labels(model_name, label).observe(taken)
    lines = [sorted(generate_latest(each).splitlines()) for each in (factory.registry, registry)]
    assert lines[0] == lines[1]
