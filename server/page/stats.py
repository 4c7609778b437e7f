"""GET /stats: the numbers of /metrics that a page or a terminal draws, as JSON.

All counts grow from the process's start, as those of /metrics do. A client subtracts two answers to
see the time between them. The server keeps no windows of time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from ropewalk.server.api.strict_body import Body
from ropewalk.server.metrics import ByContext, Metrics

_TOTALS = {
    "prompt_tokens": "ropewalk_prompt_tokens_total",
    "prompt_tokens_cached": "ropewalk_prompt_tokens_cached_total",
    "generated_tokens": "ropewalk_generated_tokens_total",
    "preemptions": "ropewalk_preemptions_total",
    "requests_running": "ropewalk_requests_running",
    "requests_waiting": "ropewalk_requests_waiting",
    "kv_cache_tokens": "ropewalk_kv_cache_tokens",
}
_DISK_PAGES = "ropewalk_kv_disk_pages_total"
_DISK_BYTES = "ropewalk_kv_disk_bytes"  # absent without a folder or a store
_MEMORY_PAGES = "ropewalk_kv_offload_pages_total"  # absent without pages in host memory
_REQUESTS = "ropewalk_requests_total"
_CACHE_BYTES = "ropewalk_kv_cache_bytes"
_CACHE_USAGE = "ropewalk_kv_cache_usage_ratio"


class LatencyCounts(Body):
    """One histogram of seconds for each context bucket, with cumulative counts."""

    counts: list[list[int]]  # [context bucket][bound], as Prometheus' `le` counts them
    sums: list[float]  # seconds in all, by context bucket


class LatencyStats(LatencyCounts):
    """The histograms of all deployments together, and of each that has some observations."""

    bounds: list[float]  # upper bounds in seconds; one more bucket without a bound follows
    models: dict[str, LatencyCounts]  # by deployment


class RequestStats(Body):
    """The requests that ended with one scaling for one reason."""

    model_name: str
    rope_type: str
    factor: str
    finish_reason: str
    count: int


class DiskStats(Body):
    """The tier of pages on disk."""

    pages_read: int
    pages_written: int
    pages_dropped: int
    pages_evicted: int
    tokens_read: int
    bad_files: int
    bytes: int
    paused: bool


class OffloadStats(Body):
    """The pages in the host memory of a GPU."""

    pages_read: int
    pages_evicted: int
    bytes: int


class Stats(Body):
    """The answer of /stats."""

    start_time_seconds: float  # Unix time from which all counts grow; differs after a restart
    context_bounds: list[int]  # upper bounds in tokens; one more bucket without a bound follows
    time_to_first_token_seconds: LatencyStats
    inter_token_latency_seconds: LatencyStats
    prompt_tokens: int
    prompt_tokens_cached: int
    generated_tokens: int
    preemptions: int
    requests_running: int
    requests_waiting: int
    kv_cache_usage_ratio: float
    kv_cache_tokens: int
    kv_cache_bytes: int  # pages and all beside them
    kv_disk: DiskStats | None  # None: there is no tier on disk
    kv_offload: OffloadStats | None  # None: no pages are in host memory
    requests: list[RequestStats]  # without those that count zero


def read_stats(metrics: Metrics) -> Stats:
    """Read the current numbers from the registry that /metrics renders."""
    samples = _samples(metrics.collect())
    totals = {field: int(_only(samples[name])) for field, name in _TOTALS.items()}
    return Stats(
        start_time_seconds=metrics.start_time_seconds,
        context_bounds=list(metrics.first_tokens.context_bounds),
        time_to_first_token_seconds=_latency(metrics.first_tokens),
        inter_token_latency_seconds=_latency(metrics.next_tokens),
        requests=[
            RequestStats(**each.labels, count=int(each.value))
            for each in samples[_REQUESTS]
            if each.value
        ],
        kv_cache_usage_ratio=_only(samples[_CACHE_USAGE]),
        kv_cache_bytes=sum(int(each.value) for each in samples[_CACHE_BYTES]),
        kv_disk=_disk(samples) if _DISK_BYTES in samples else None,
        kv_offload=_offload(samples) if _MEMORY_PAGES in samples else None,
        **totals,
    )


def _disk(samples: Mapping[str, list[Sample]]) -> DiskStats:
    """Read the tier of pages on disk."""
    pages = _by_event(samples[_DISK_PAGES])

    def values(name: str) -> list[int]:
        return [int(each.value) for each in samples[f"ropewalk_kv_disk_{name}"]]

    return DiskStats(
        pages_read=pages["read"],
        pages_written=pages["written"],
        pages_dropped=pages["dropped"],
        pages_evicted=pages["evicted"],
        tokens_read=sum(values("tokens_read_total")),
        bad_files=sum(values("bad_files_total")),
        bytes=max(int(each.value) for each in samples[_DISK_BYTES]),
        paused=any(values("paused")),
    )


def _offload(samples: Mapping[str, list[Sample]]) -> OffloadStats:
    """Read the pages in host memory."""
    pages = _by_event(samples[_MEMORY_PAGES])
    return OffloadStats(
        pages_read=pages["read"],
        pages_evicted=pages["evicted"],
        bytes=sum(int(each.value) for each in samples["ropewalk_kv_offload_bytes"]),
    )


def _by_event(samples: list[Sample]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in samples:
        found[each.labels["event"]] += int(each.value)
    return found


def _only(samples: list[Sample]) -> float:
    """Return the value of a family without labels."""
    (sample,) = samples
    return float(sample.value)


def _samples(families: Iterable[Metric]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for family in families:
        for sample in family.samples:
            found[sample.name].append(sample)
    return found


def _latency(histogram: ByContext) -> LatencyStats:
    models = {
        name: LatencyCounts(counts=model.cumulative(), sums=list(model.sums))
        for name, model in histogram.models().items()
    }
    num_contexts, num_counts = len(histogram.context_bounds) + 1, len(histogram.bounds) + 1
    counts = [[0] * num_counts for _ in range(num_contexts)]
    sums = [0.0] * num_contexts
    for model in models.values():
        for at, more in enumerate(model.counts):
            counts[at] = [one + other for one, other in zip(counts[at], more, strict=True)]
            sums[at] += model.sums[at]
    return LatencyStats(bounds=list(histogram.bounds), counts=counts, sums=sums, models=models)
