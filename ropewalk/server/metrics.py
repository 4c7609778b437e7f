"""Prometheus metrics. Times are recorded by the context length at which they were measured.

Labels are bounded: deployments, methods and factors come from the configuration, never from a
client's string. A series with the label `model_name` exists from its first observation on, because
there would be thousands of zeros otherwise.
"""

import bisect
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.model_runtime.runner.step_timer import PARTS, Part
from ropewalk.rope import Tier
from ropewalk.server.version import own_commit, own_version

if TYPE_CHECKING:  # without a lower store, nothing of it is imported
    from ropewalk.model_runtime.engine.kv_disk.counts import StoreCounts
    from ropewalk.server.disk_metrics import DiskMetrics

# vLLM's bounds, so that dashboard panels can be compared.
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_NEXT_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    10, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)  # fmt: skip


TOOL_OUTCOMES = ("ok", "cut", "unparsed", "repeated")


class MetricFactory:
    """A factory of metrics in one registry; a distributed engine may use another factory."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they add a third more series, which are not used here
        self.registry = CollectorRegistry()

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Create a count that only grows; the client library appends _total."""
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=tuple(bounds), registry=self.registry)

    def by_context(
        self, name: str, text: str, bounds: Sequence[float], context_bounds: Sequence[int]
    ) -> "ByContext":
        """Create a histogram of times by context length, for one thread that observes."""
        histogram = ByContext(name, text, bounds, context_bounds)
        self.registry.register(histogram)
        return histogram


@dataclass(slots=True)
class LatencyCounts:
    """The observations of one deployment, by context bucket and bound, and their sums."""

    counts: list[list[int]]  # [context bucket][bound]; each observation counts once
    sums: list[float]  # seconds, by context bucket

    def cumulative(self) -> list[list[int]]:
        """Return the counts as Prometheus' `le` has them, each of them read once."""
        return [list(accumulate(each)) for each in self.counts]


class ByContext(Collector):
    """A histogram by deployment and context bucket; only the engine's thread may observe.

    It counts in plain lists. The client library's own takes a lock for each of two numbers, which
    is most of the cost of a token's metrics.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], context_bounds: Sequence[int]
    ) -> None:
        self._name, self._text = name, text
        self.bounds, self.context_bounds = bounds, context_bounds
        self._models: dict[str, LatencyCounts] = {}

    def observe(self, model_name: str, context_len: int, seconds: float) -> None:
        """Count a time in the bucket of its context length (upper bounds are inclusive)."""
        model = self._models.get(model_name) or self._first_of(model_name)
        context = bisect.bisect_left(self.context_bounds, context_len)
        model.counts[context][bisect.bisect_left(self.bounds, seconds)] += 1
        model.sums[context] += seconds

    def _first_of(self, model_name: str) -> LatencyCounts:
        num_contexts = len(self.context_bounds) + 1
        counts = [[0] * (len(self.bounds) + 1) for _ in range(num_contexts)]
        self._models[model_name] = LatencyCounts(counts, [0.0] * num_contexts)
        return self._models[model_name]

    def models(self) -> dict[str, LatencyCounts]:
        """Return the counts of the deployments that have some, while the engine's thread counts."""
        return self._models.copy()

    def collect(self) -> Iterator[Metric]:
        """Yield the whole histogram as the client library's own would."""
        family = HistogramMetricFamily(
            self._name, self._text, labels=["model_name", "context_bucket"]
        )
        labels = [*map(str, self.context_bounds), "+Inf"]
        bounds = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*self.bounds, math.inf)
        ]
        for model_name, model in self.models().items():
            for label, counts, total in zip(labels, model.cumulative(), model.sums, strict=True):
                if counts[-1]:
                    buckets = list(zip(bounds, map(float, counts), strict=True))
                    family.add_metric([model_name, label], buckets, total)
        yield family


def _disk_metrics(factory: MetricFactory, config: EngineConfig) -> "DiskMetrics":
    from ropewalk.server import disk_metrics  # noqa: PLC0415  # not without a lower store

    has_place = config.kv_disk is not None or config.kv_store is not None
    has_memory = config.kv_offload_gib is not None
    return disk_metrics.DiskMetrics(factory, has_place=has_place, has_memory=has_memory)


class Metrics(Observer):
    """An observer of the engine, and of requests that the server refuses before it."""

    def __init__(
        self,
        factory: MetricFactory,
        context_bounds: Sequence[int],
        config: EngineConfig,
        rejection_reasons: Sequence[str],
        cache_bytes: Mapping[str, int],
    ) -> None:
        """Create all families, and the series whose labels are few."""
        self.start_time_seconds = time.time()  # of all counts
        self._registry = factory.registry
        ProcessCollector(registry=factory.registry)  # memory, processor time and files; on Linux
        self._num_generated = 0  # tokens since the last step was recorded
        self._num_pages = config.num_pages

        def by_context(name: str, text: str, bounds: Sequence[float]) -> ByContext:
            return factory.by_context(f"ropewalk_{name}", text, bounds, context_bounds)

        self.first_tokens = by_context(
            "time_to_first_token_seconds",
            "From arrival to the first token, by prompt length.",
            _FIRST_TOKEN_SECONDS,
        )
        self.next_tokens = by_context(
            "inter_token_latency_seconds",
            "From one token to the next, by the sequence's length with the token just made.",
            _NEXT_TOKEN_SECONDS,
        )
        self._end_to_end = by_context(
            "e2e_request_latency_seconds",
            "From arrival to the end of an answer, by final length.",
            _REQUEST_SECONDS,
        )
        self._queue = by_context(
            "request_queue_seconds",
            "From arrival to the first step, by prompt length.",
            _FIRST_TOKEN_SECONDS,
        )
        self._prefill = by_context(
            "request_prefill_seconds",
            "From the first step to the first token, by prompt length.",
            _FIRST_TOKEN_SECONDS,
        )
        self._requests = factory.counter(
            "ropewalk_requests",
            "Requests that ended, by what was applied and why they ended.",
            ["model_name", "rope_type", "factor", "finish_reason"],
        )
        self._rejected = factory.counter(
            "ropewalk_requests_rejected", "Requests refused before they were queued.", ["reason"]
        )
        self._tool_calls = factory.counter(
            "ropewalk_tool_calls",
            "Tool calls in answers: read (ok), cut by max_tokens, or unparsed and left as text.",
            ["outcome"],
        )
        for outcome in TOOL_OUTCOMES:
            self._tool_calls.labels(outcome=outcome)
        self._prompt_tokens = factory.counter(
            "ropewalk_prompt_tokens", "Prompt tokens of requests that were started."
        )
        self._cached_tokens = factory.counter(
            "ropewalk_prompt_tokens_cached", "Those of them that were found in the prefix cache."
        )
        self._missed_tokens = factory.counter(
            "ropewalk_prompt_tokens_under_other_tables",
            "Prompt tokens that were computed, though the prefix cache had them: under the tables "
            "of another method, policy or factor.",
        )
        self._prefix_hits = factory.counter(
            "ropewalk_prefix_cache_hits", "Requests that began on pages of the prefix cache."
        )
        self._nan_aborts = factory.counter(
            "ropewalk_nan_aborts", "Requests ended because the model answered with NaN or Inf."
        )
        self._preemptions = factory.counter(
            "ropewalk_preemptions", "Times a request lost its pages and was computed again."
        )
        self._rescales = factory.counter(
            "ropewalk_rope_rescales",
            "Times a growing request moved to a higher tier.",
            ["model_name", "policy"],
        )
        self._beyond = factory.counter(
            "ropewalk_requests_beyond_trained_length",
            "Requests that ended with more positions than their table is made for.",
            ["model_name"],
        )
        self._generated_tokens = factory.counter("ropewalk_generated_tokens", "Tokens generated.")
        self._draft_tokens = factory.counter(
            "ropewalk_draft_tokens", "Tokens of drafts that steps computed."
        )
        self._accepted_tokens = factory.counter(
            "ropewalk_draft_tokens_accepted", "Those of them that were chosen."
        )
        self._steps = factory.counter(
            "ropewalk_steps", "Steps of the engine that computed something."
        )
        parts = factory.counter("ropewalk_step_seconds", "Time of those steps by part.", ["part"])
        self._parts = {part: parts.labels(part) for part in PARTS}
        self._running = factory.gauge("ropewalk_requests_running", "Requests being computed.")
        self._waiting = factory.gauge("ropewalk_requests_waiting", "Requests in the queue.")
        self._waiting_tokens = factory.gauge(
            "ropewalk_prompt_tokens_waiting", "Prompt tokens of the requests in the queue."
        )
        self._kv_usage = factory.gauge(
            "ropewalk_kv_cache_usage_ratio", "Share of the cache's pages in use, 0 to 1."
        )
        self._num_slots = config.num_state_slots
        if self._num_slots:
            self._state_usage = factory.gauge(
                "ropewalk_state_slots_usage_ratio",
                "Share of the slots of states that sequences use, 0 to 1.",
            )
        self._disk: DiskMetrics | None = None
        if config.lower_store_setting is not None:
            self._disk = _disk_metrics(factory, config)
        factory.gauge("ropewalk_kv_cache_tokens", "Size of the whole KV cache in tokens.").set(
            config.capacity
        )
        # Sequences of windows alone have no limit, and still no page holds more than its positions.
        num_positions = min(config.longest_context, config.num_pages * config.page_size)
        factory.gauge(
            "ropewalk_kv_cache_positions",
            "Positions of the longest context in the KV cache.",
        ).set(num_positions)
        sizes = factory.gauge("ropewalk_kv_cache_bytes", "Bytes of the cache by part.", ["part"])
        for part, size in cache_bytes.items():
            sizes.labels(part).set(size)
        factory.gauge(
            "ropewalk_kv_cache_info", "Always 1; the label is kv_cache_dtype.", ["format"]
        ).labels(config.kv_cache_dtype).set(1)
        factory.gauge(
            "ropewalk_build_info", "Always 1; the labels say what runs.", ["version", "commit"]
        ).labels(own_version(), own_commit() or "unknown").set(1)
        for reason in rejection_reasons:
            self._rejected.labels(reason)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def render(self) -> bytes:
        """Return the page that Prometheus scrapes."""
        return generate_latest(self._registry)

    def tool_calls(self, outcomes: Mapping[str, int]) -> None:
        """Count the tool calls of an answer by their outcome, one of TOOL_OUTCOMES."""
        for outcome, number in outcomes.items():
            self._tool_calls.labels(outcome=outcome).inc(number)

    def rejected(self, reason: str) -> None:
        """Record a refused request; `reason` is one of `rejection_reasons()`."""
        self._rejected.labels(reason).inc()

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Record a request that left the queue."""
        self._prompt_tokens.inc(len(request.prompt_ids))
        self._cached_tokens.inc(num_cached_tokens)
        self._prefix_hits.inc(num_cached_tokens > 0)
        self._queue.observe(request.tier_choice.deployment, len(request.prompt_ids), queue_seconds)

    def missed(self, request: Request, num_tokens: int) -> None:  # noqa: ARG002
        self._missed_tokens.inc(num_tokens)

    def preempted(self, request: Request) -> None:  # noqa: ARG002
        self._preemptions.inc()

    def nan_aborted(self, request: Request) -> None:  # noqa: ARG002
        self._nan_aborts.inc()

    def rescaled(self, request: Request) -> None:
        self._rescales.labels(request.tier_choice.deployment, request.tier_choice.policy).inc()

    def first_token(self, request: Request, seconds: float, prefill_seconds: float) -> None:
        """Record the first token of a request."""
        self._num_generated += 1
        model_name, prompt_len = request.tier_choice.deployment, len(request.prompt_ids)
        self.first_tokens.observe(model_name, prompt_len, seconds)
        self._prefill.observe(model_name, prompt_len, prefill_seconds)

    def next_token(self, request: Request, context_len: int, seconds: float) -> None:
        self._num_generated += 1
        self.next_tokens.observe(request.tier_choice.deployment, context_len, seconds)

    def finished(
        self, request: Request, tier: Tier, reason: FinishReason, num_generated: int, seconds: float
    ) -> None:
        """Record a request that ended."""
        rope_type, factor = tier.profile.name, f"{tier.factor:g}"
        model_name = request.tier_choice.deployment
        self._requests.labels(model_name, rope_type, factor, reason.value).inc()
        if tier.is_beyond(request.positions_with(num_generated)):
            self._beyond.labels(model_name).inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            final_len = len(request.prompt_ids) + num_generated
            self._end_to_end.observe(model_name, final_len, seconds)

    def speculated(self, num_drafted: int, num_accepted: int) -> None:
        self._draft_tokens.inc(num_drafted)
        self._accepted_tokens.inc(num_accepted)

    def stepped(
        self, num_running: int, num_waiting: int, num_waiting_tokens: int, num_used_pages: int
    ) -> None:
        """Record the end of a step."""
        self._generated_tokens.inc(self._num_generated)
        self._num_generated = 0
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._waiting_tokens.set(num_waiting_tokens)
        self._kv_usage.set(num_used_pages / self._num_pages)

    def states_held(self, num_used_slots: int) -> None:
        """Record the slots in use, after `stepped`."""
        self._state_usage.set(num_used_slots / self._num_slots)

    def pages_stored(self, counts: "StoreCounts") -> None:
        if self._disk is not None:
            self._disk.add(counts)

    def timed(self, seconds: Mapping[Part, float]) -> None:
        self._steps.inc()
        for part, taken in seconds.items():
            self._parts[part].inc(taken)
