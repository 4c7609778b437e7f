"""GET /stats: the numbers of /metrics that a page or a terminal draws, as JSON.

All counts grow from the process's start, as those of /metrics do. A client subtracts two answers to
see the time between them. The server keeps no windows of time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from pydantic import Field

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

    counts: list[list[int]] = Field(examples=[[[3, 5, 5]]])
    """Counts by context bucket and bound, as Prometheus' `le` counts them."""
    sums: list[float] = Field(examples=[[0.31]])
    """Seconds in all, by context bucket."""


class LatencyStats(LatencyCounts):
    """The histograms of all deployments together, and of each that has some observations."""

    bounds: list[float] = Field(examples=[[0.1, 1.0]])
    """Upper bounds in seconds. One more bucket without a bound follows."""
    models: dict[str, LatencyCounts] = Field(
        examples=[{"ropewalk-demo": {"counts": [[3, 5, 5]], "sums": [0.31]}}]
    )
    """The histograms by deployment."""


class RequestStats(Body):
    """The requests that ended with one scaling for one reason."""

    model_name: str = Field(examples=["ropewalk-demo"])
    """The served name."""
    rope_type: str = Field(examples=["yarn"])
    """The method, and a position method behind a `+`."""
    factor: str = Field(examples=["2"])
    """The factor of the tier."""
    finish_reason: str = Field(examples=["stop"])
    """The reason of the end."""
    count: int = Field(examples=[12])
    """Number of the requests."""


class DiskStats(Body):
    """Pages on disk."""

    pages_read: int = Field(examples=[120])
    """Pages that were read."""
    pages_written: int = Field(examples=[300])
    """Pages that were written."""
    pages_dropped: int = Field(examples=[0])
    """Pages that were not written, because the disk was too slow."""
    pages_evicted: int = Field(examples=[10])
    """Pages that were deleted for others."""
    tokens_read: int = Field(examples=[7680])
    """Tokens of prompts that were read instead of computed."""
    bad_files: int = Field(examples=[0])
    """Files that could not be used."""
    bytes: int = Field(examples=[33554432])
    """Bytes of the folder or of the store."""
    paused: bool
    """Whether the store is paused after an error."""


class OffloadStats(Body):
    """The pages in the host memory of a GPU."""

    pages_read: int = Field(examples=[120])
    """Pages that were copied back."""
    pages_evicted: int = Field(examples=[10])
    """Pages that made room for others."""
    bytes: int = Field(examples=[33554432])
    """Bytes of the memory in use."""


class Stats(Body):
    """The answer of /stats."""

    start_time_seconds: float = Field(examples=[1764288000.25])
    """Unix time from which all counts grow. It differs after a restart."""
    context_bounds: list[int] = Field(examples=[[256, 512]])
    """Upper bounds of the context buckets in tokens. One more bucket without a bound follows."""
    time_to_first_token_seconds: LatencyStats
    """Times to the first token."""
    inter_token_latency_seconds: LatencyStats
    """Times between tokens."""
    prompt_tokens: int = Field(examples=[9000])
    """Tokens of prompts."""
    prompt_tokens_cached: int = Field(examples=[4096])
    """Tokens of prompts that were found in the prefix cache."""
    generated_tokens: int = Field(examples=[12000])
    """Tokens of answers."""
    preemptions: int = Field(examples=[0])
    """Requests that gave their pages up and were computed again."""
    requests_running: int = Field(examples=[2])
    """Requests that run now."""
    requests_waiting: int = Field(examples=[0])
    """Requests that wait now."""
    kv_cache_usage_ratio: float = Field(examples=[0.25])
    """Share of the cache that running requests hold."""
    kv_cache_tokens: int = Field(examples=[16384])
    """Tokens of the whole cache."""
    kv_cache_bytes: int = Field(examples=[67108864])
    """Bytes of the cache and of all that is beside its pages."""
    kv_disk: DiskStats | None
    """Pages on disk, or null if there is none."""
    kv_offload: OffloadStats | None
    """The pages in host memory, or null if there are none."""
    requests: list[RequestStats]
    """Requests that ended, without counts of zero."""


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
    """Read the samples of pages on disk."""
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
