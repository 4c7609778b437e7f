"""The metrics page of an API process: its own series, and those of each replica with its number.

A new replica takes the number of one that has gone, and its counters go on there. So no counter
falls or jumps, `rate` stays right, and there are no more series than replicas at one time. Gauges
of a replica that has gone are dropped.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ropewalk.server.access.open_request import AnswerWatch, Put
from ropewalk.server.metrics import MetricFactory
from ropewalk.server.replicas.remote_engine import CONTINUED, LOST_REASONS

Pages = Mapping[str, Sequence[Metric]]  # of each replica
_COLLECT_S = 5.0  # a replica that is slower shows what it had before
# These come from the replicas. Answers to clients are counted here, because a replica may be lost
# with its counts, and a request that goes on elsewhere counts once.
_OF_ENGINES = frozenset(
    f"ropewalk_{name}"
    for name in (
        "request_queue_seconds",
        "request_prefill_seconds",
        "nan_aborts",
        "preemptions",
        "rope_rescales",
        "steps",
        "step_seconds",
        "requests_running",
        "requests_waiting",
        "state_slots_usage_ratio",
        "kv_cache_usage_ratio",
        "kv_cache_tokens",
        *(f"kv_disk_{each}" for each in ("pages", "bad_files", "tokens_read", "seconds")),
        *("kv_disk_bytes", "kv_disk_paused"),
    )
)
_OF_PROCESSES = "process_"  # both have these; the API's have no label `replica`


class ReplicaCounts:
    """Counters of what becomes of requests between the API and the replicas."""

    def __init__(self, factory: MetricFactory) -> None:
        self._lost = factory.counter(
            "ropewalk_replica_lost_requests",
            "Requests whose replica was lost before (retry) or after (continuation) their first "
            "output.",
            ["reason", "kind"],
        )
        self._continued = factory.counter(
            "ropewalk_replica_continuations",
            "Requests that had lost a replica, by how they ended.",
            ["outcome"],
        )
        self.predicted = factory.counter(
            "ropewalk_replica_predicted_cached_tokens",
            "Prompt tokens that the chosen replica should have had in its prefix cache.",
        )
        self.ready = factory.gauge("ropewalk_replicas_ready", "Replicas that take requests.")
        for reason in LOST_REASONS:
            for kind in ("retry", "continuation"):
                self._lost.labels(reason, kind)
        for outcome in CONTINUED:
            self._continued.labels(outcome)

    def lost(self, reason: str, *, has_begun: bool) -> None:
        self._lost.labels(reason, "continuation" if has_begun else "retry").inc()

    def continued(self, outcome: str) -> None:
        self._continued.labels(outcome).inc()


_Key = tuple[str, str, tuple[tuple[str, str], ...]]  # names of family and sample, labels


class _Place:
    """The series of one place, which replicas take one after another."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.is_taken = True
        self.page: Sequence[Metric] = ()
        self._before: dict[_Key, float] = {}  # the counts of the replicas that had it before

    def give_to(self, replica: str) -> None:
        """Go on with another replica, whose counts begin at zero."""
        self.is_taken = False  # so that no gauge is among the counts
        self._before = self.values()
        self.replica, self.page = replica, ()

    def values(self) -> dict[_Key, float]:
        """Return the values of all samples; a place without a replica has no gauges."""
        values = dict(self._before)
        for family in self.page:
            if not _is_of_replicas(family) or (family.type == "gauge" and not self.is_taken):
                continue
            for sample in family.samples:
                key = family.name, sample.name, tuple(sample.labels.items())
                values[key] = self._before.get(key, 0.0) + sample.value
        return values


class MergedPages(Collector):
    """The families of all replicas, with the label `replica`, which is the number of a place.

    A replica takes the place of one that has gone, and its counters go on from there.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._families: dict[str, Metric] = {}  # without samples

    def update(self, pages: Pages, living: Iterable[str]) -> None:
        """Take new pages. The places of replicas that are not `living` any more are free."""
        living = set(living)
        for place in self._places:
            place.is_taken = place.replica in living
        with_place = {place.replica for place in self._places}
        for replica, page in pages.items():
            if replica not in living and replica not in with_place:
                continue  # a late page, whose counts a new replica has already gone on from
            self._place_of(replica, pages).page = page
            for family in page:
                if _is_of_replicas(family):
                    self._families.setdefault(family.name, _empty(family))

    def _place_of(self, replica: str, pages: Pages) -> _Place:
        """Return the place of a replica, which may be new."""
        free = None
        for place in self._places:
            if place.replica == replica:
                return place
            if not place.is_taken and place.replica not in pages and free is None:
                free = place
        if free is None:
            self._places.append(_Place(replica))
            return self._places[-1]
        free.give_to(replica)
        free.is_taken = True
        return free

    def collect(self) -> Iterable[Metric]:
        """Return one family for each name, with the samples of all replicas."""
        merged = {name: _empty(family) for name, family in self._families.items()}
        for number, place in enumerate(self._places):
            for (family, name, labels), value in place.values().items():
                sample = Sample(name, {**dict(labels), "replica": str(number)}, value)
                merged[family].samples.append(sample)
        return [family for family in merged.values() if family.samples]


def _is_of_replicas(family: Metric) -> bool:
    return family.name in _OF_ENGINES or family.name.startswith(_OF_PROCESSES)


def _empty(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type, family.unit)


class FleetMetrics(AnswerWatch):
    """The metrics of an API process whose engines are replicas."""

    def __init__(self, put: Put, factory: MetricFactory, *args: Any) -> None:
        """Take the arguments of AnswerWatch."""
        super().__init__(put, factory, *args)
        self.counts = ReplicaCounts(factory)
        self._merged = MergedPages()
        self._lock = threading.Lock()  # guards it, because pages may be asked for at one time
        self._collect_pages: Callable[[], Coroutine[Any, Any, Pages]] | None = None
        self._living: Callable[[], Sequence[str]] = tuple
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(
        self, collect: Callable[[], Coroutine[Any, Any, Pages]], living: Callable[[], Sequence[str]]
    ) -> None:
        """Ask the replicas for their pages from now on; call it on the event loop."""
        self._collect_pages, self._living = collect, living
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        """Return all series; call it off the event loop, because replicas are asked."""
        pages: Pages = {}
        if self._collect_pages is not None and self._loop is not None:
            asking = asyncio.run_coroutine_threadsafe(self._asked(), self._loop)
            try:
                pages = asking.result(_COLLECT_S)
            except TimeoutError:
                asking.cancel()
        living = self._living()
        self.counts.ready.set(len(living))
        with self._lock:
            self._merged.update(pages, living)
            merged = list(self._merged.collect())
        own = {each.name: each for each in super().collect() if each.name not in _OF_ENGINES}
        for family in merged:
            if family.name in own:
                own[family.name].samples += family.samples
        return [*own.values(), *(each for each in merged if each.name not in own)]

    async def _asked(self) -> Pages:
        """Ask the replicas, and count the tokens delivered so far; on the loop that counts them."""
        self.stepped(0, 0, 0)
        assert self._collect_pages is not None
        return await self._collect_pages()

    def render(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(_Fixed(list(self.collect())))
        return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
