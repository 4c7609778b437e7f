"""Prometheus metrics of the store below the cache; without one, they do not exist."""

from typing import TYPE_CHECKING, get_args

from ropewalk.model_runtime.engine.kv_disk.files.page_file import Reason

if TYPE_CHECKING:
    from ropewalk.model_runtime.engine.kv_disk.counts import StoreCounts
    from ropewalk.server.metrics import MetricFactory

_EVENTS = ("read", "written", "dropped", "evicted")
_MEMORY_EVENTS = ("read", "evicted")


class DiskMetrics:
    """The metrics of one engine's lower store."""

    def __init__(
        self, factory: "MetricFactory", *, has_place: bool = True, has_memory: bool = False
    ) -> None:
        """Create all families, with every label.

        `has_place`: there is a folder or a store. `has_memory`: pages are in host memory.
        """
        self._pages = factory.counter(
            "ropewalk_kv_disk_pages", "Pages on disk by event.", ["event"]
        )
        self._bad = factory.counter(
            "ropewalk_kv_disk_bad_files",
            "Reads that gave no page though a file was there, by reason.",
            ["reason"],
        )
        self._tokens = factory.counter(
            "ropewalk_kv_disk_tokens_read", "Tokens of the pages that were read."
        )
        self._seconds = factory.counter(
            "ropewalk_kv_disk_seconds", "Time that reads and writes of files took.", ["way"]
        )
        self._paused = factory.gauge(
            "ropewalk_kv_disk_paused", "1 while reads or writes pause after a fault, else 0."
        )
        self._place = _PlaceMetrics(factory) if has_place else None
        self._memory = _MemoryMetrics(factory) if has_memory else None
        for event in _EVENTS:
            self._pages.labels(event)
        for reason in get_args(Reason):
            self._bad.labels(reason)
        for way in ("read", "write"):
            self._seconds.labels(way)

    def add(self, counts: "StoreCounts") -> None:
        """Add what has happened since the last call."""
        for event, number in counts.pages.items():
            self._pages.labels(event).inc(number)
        for reason, number in counts.bad_files.items():
            self._bad.labels(reason).inc(number)
        self._tokens.inc(counts.num_tokens_read)
        self._seconds.labels("read").inc(counts.read_s)
        self._seconds.labels("write").inc(counts.write_s)
        self._paused.set(counts.is_paused)
        for each in (self._place, self._memory):
            if each is not None:
                each.add(counts)


class _PlaceMetrics:
    """The metrics of the folder or the store."""

    def __init__(self, factory: "MetricFactory") -> None:
        self._bytes = factory.gauge(
            "ropewalk_kv_disk_bytes", "Size of the folder, as far as this server knows."
        )
        self._info = factory.gauge(
            "ropewalk_kv_disk_info",
            "Always 1; servers that share pages have the same place.",
            ["place"],
        )
        self._name: str | None = None

    def add(self, counts: "StoreCounts") -> None:
        """Take over the size, and the place's name if it has changed."""
        self._bytes.set(counts.num_bytes)
        if counts.place is not None and counts.place != self._name:
            self._info.clear()
            self._info.labels(counts.place).set(1)
            self._name = counts.place


class _MemoryMetrics:
    """The metrics of pages in host memory."""

    def __init__(self, factory: "MetricFactory") -> None:
        """Create both families, with every label."""
        self._pages = factory.counter(
            "ropewalk_kv_offload_pages", "Pages of host memory by event.", ["event"]
        )
        self._bytes = factory.gauge("ropewalk_kv_offload_bytes", "Size of pages in host memory.")
        for event in _MEMORY_EVENTS:
            self._pages.labels(event)

    def add(self, counts: "StoreCounts") -> None:
        """Add what has happened since the last call."""
        for event, number in counts.memory.items():
            self._pages.labels(event).inc(number)
        self._bytes.set(counts.num_memory_bytes)
