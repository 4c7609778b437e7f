"""The metrics of several servers as one page, held against the client library's own parser."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ropewalk.server.router.fleet.fleet_page import FleetPage

ADDRESSES = ("http://a:1", "http://b:1")


class Process:
    """The metrics of one process."""

    def __init__(self, start: float | None) -> None:
        self._registry = CollectorRegistry()
        self.answers = Counter("answers", "Ended.", ["name"], registry=self._registry)
        self.times = Histogram(
            "times", "Times.", ["model_name"], buckets=(1, 2), registry=self._registry
        )
        self.usage = Gauge("usage", "Share.", registry=self._registry)
        self.told = Gauge("info", "About.", ["text"], registry=self._registry)
        if start is not None:
            Gauge("process_start_time_seconds", "Start.", registry=self._registry).set(start)

    def page(self) -> bytes:
        return generate_latest(self._registry)


def samples(page: FleetPage, present: tuple[str, ...] = ADDRESSES) -> dict[str, float]:
    """All samples by name and labels."""
    return {
        f"{each.name}{sorted(each.labels.values())}": each.value
        for family in text_string_to_metric_families(page.render(present).decode())
        for each in family.samples
    }


def test_counts_are_sums_and_gauges_tell_their_server() -> None:
    """Label values may have spaces, braces and quotes."""
    page = FleetPage()
    for number, address in enumerate(ADDRESSES, 1):
        process = Process(number)
        page.note(address, process.page())
        process.answers.labels('a "b" } c').inc(number)
        process.times.labels("m").observe(number)
        process.usage.set(number / 10)
        process.told.labels("x y").set(1)
        page.note(address, process.page())
    found = samples(page)
    assert found["answers_total['a \"b\" } c']"] == 3
    assert found["times_bucket['1.0', 'm']"] == 1
    assert found["times_bucket['2.0', 'm']"] == found["times_bucket['+Inf', 'm']"] == 2
    assert found["times_sum['m']"] == 3
    assert found["usage['http://a:1']"] == 0.1
    assert found["info['http://b:1', 'x y']"] == 1
    kinds = {each.name: each.type for each in text_string_to_metric_families(
        page.render(ADDRESSES).decode()
    )}  # fmt: skip
    assert kinds["answers"] == "counter"
    assert kinds["times"] == "histogram"


def test_counts_survive_a_server_that_is_lost_and_one_that_starts_again() -> None:
    """A new process at the address begins at zero, and so do several, one after the other."""
    page, first = FleetPage(), Process(1)
    page.note(ADDRESSES[0], first.page())
    first.answers.labels("a").inc(5)
    first.usage.set(1)
    page.note(ADDRESSES[0], first.page())
    assert samples(page, ())["answers_total['a']"] == 5
    assert "usage['http://a:1']" not in samples(page, ())
    for start in (2, 3):
        second = Process(start)
        second.answers.labels("a").inc(9)  # more than before, so that only the start tells
        page.note(ADDRESSES[0], second.page())
    assert samples(page)["answers_total['a']"] == 5 + 9 + 9
    second.answers.labels("a").inc()
    page.note(ADDRESSES[0], second.page())
    assert samples(page)["answers_total['a']"] == 24


def test_a_server_that_comes_back_counts_once() -> None:
    """It was not ready for a while, or its name did not resolve to it."""
    page, process = FleetPage(), Process(1)
    page.note(ADDRESSES[0], process.page())
    process.answers.labels("a").inc(5)
    for _ in range(2):
        page.note(ADDRESSES[0], process.page())
        assert samples(page, ())["answers_total['a']"] == 5
    page.end(ADDRESSES[0])
    assert samples(page, ())["answers_total['a']"] == 5
    process.answers.labels("a").inc()  # by another router
    page.note(ADDRESSES[0], process.page())
    assert samples(page)["answers_total['a']"] == 5
    assert samples(page)["usage['http://a:1']"] == 0
    process.answers.labels("a").inc()
    page.note(ADDRESSES[0], process.page())
    assert samples(page)["answers_total['a']"] == 6


def test_counts_from_before_the_router_knew_a_server_are_left_out() -> None:
    """Else a sum would jump when an old server joins, and after a start of the router."""
    page = FleetPage()
    for number, address in enumerate(ADDRESSES, 1):
        process = Process(number)
        process.answers.labels("a").inc(100)
        process.times.labels("m").observe(0.1)
        page.note(address, process.page())
        assert samples(page)["answers_total['a']"] == number - 1
        assert samples(page)["times_sum['m']"] == 0
        process.answers.labels("a").inc()
        page.note(address, process.page())
    assert samples(page)["answers_total['a']"] == 2


def test_series_that_go_and_come_again_keep_their_counts() -> None:
    """So do those of an API key that a reload of the settings removes."""
    page, process = FleetPage(), Process(1)
    page.note(ADDRESSES[0], process.page())
    for number in range(1, 4):
        process.answers.labels("a").inc(5)
        process.answers.labels("b").inc()
        page.note(ADDRESSES[0], process.page())
        process.answers.remove("a")
        page.note(ADDRESSES[0], process.page())
        assert samples(page)["answers_total['a']"] == 5 * number
        assert samples(page)["answers_total['b']"] == number
    process.answers.labels("a").inc(2)
    page.note(ADDRESSES[0], process.page())
    assert samples(page)["answers_total['a']"] == 17


def test_a_series_that_fell_counts_from_zero() -> None:
    """A key was removed and added again between two pages."""
    page, process = FleetPage(), Process(1)
    page.note(ADDRESSES[0], process.page())
    process.answers.labels("a").inc(5)
    page.note(ADDRESSES[0], process.page())
    process.answers.remove("a")
    process.answers.labels("a").inc(2)
    page.note(ADDRESSES[0], process.page())
    assert samples(page)["answers_total['a']"] == 7


def test_no_shown_count_falls_by_rounding() -> None:
    """Prometheus would take it for a restart, and count everything again."""
    page, before = FleetPage(), 0.0
    processes = {f"http://{number}:1": Process(number) for number in range(9)}
    for address, process in processes.items():
        page.note(address, process.page())
    for address, process in processes.items():
        process.times.labels("m").observe(0.1)
        page.note(address, process.page())
    for address in reversed(processes):
        page.end(address)
        found = samples(page)["times_sum['m']"]
        assert found >= before
        before = found


def test_a_fall_tells_of_a_new_process_where_no_start_is_known() -> None:
    """Only Linux tells when a process began."""
    page = FleetPage()
    page.note(ADDRESSES[0], Process(None).page())
    for number in (5, 2):
        process = Process(None)
        process.answers.labels("a").inc(number)
        page.note(ADDRESSES[0], process.page())
    assert samples(page)["answers_total['a']"] == 7
