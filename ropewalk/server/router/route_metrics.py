"""Counts of a router."""

from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

_KINDS = ("retry", "continuation", "busy")
_OUTCOMES = ("ok", "diverged", "given_up")


class RouteMetrics:
    """The router's own counts."""

    def __init__(self) -> None:
        """Create all families, and the series whose labels are few."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as on a server's page
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "ropewalk_router_requests",
            "Requests that the router has answered, by status.",
            ["status"],
            registry=self._registry,
        )
        self._lost = Counter(
            "ropewalk_router_retries",
            "Requests sent to another server: the first one was lost before the answer began "
            "(retry) or within it (continuation), or was busy.",
            ["kind"],
            registry=self._registry,
        )
        self._continued = Counter(
            "ropewalk_router_continued",
            "Streams that had lost a server, by how they ended.",
            ["outcome"],
            registry=self._registry,
        )
        self._servers = Gauge(
            "ropewalk_router_servers",
            "Servers that are known, by whether they take requests.",
            ["state"],
            registry=self._registry,
        )
        self._refused = Gauge(
            "ropewalk_router_refused_servers",
            "Servers that are ready and get no requests, by the reason.",
            ["reason"],
            registry=self._registry,
        )
        for kind in _KINDS:
            self._lost.labels(kind)
        for outcome in _OUTCOMES:
            self._continued.labels(outcome)

    def answered(self, status: int) -> None:
        self._answers.labels(str(status)).inc()

    def lost(self, kind: str) -> None:
        self._lost.labels(kind).inc()

    def continued(self, outcome: str) -> None:
        self._continued.labels(outcome).inc()

    def page(self, states: Mapping[str, str], refused: Mapping[str, int]) -> bytes:
        """Return the page that Prometheus scrapes."""
        num_ready = sum(1 for state in states.values() if state == "ready")
        self._servers.labels("ready").set(num_ready)
        self._servers.labels("other").set(len(states) - num_ready)
        for reason, num in refused.items():
            self._refused.labels(reason).set(num)
        return generate_latest(self._registry)
