"""One page for a fleet: no counter ever falls or jumps, and each request is counted once."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Placement
from ropewalk.model_runtime.request import FinishReason, Request, SamplingParams
from ropewalk.rope import Profile, Tier, Unscaled
from ropewalk.server.metrics import MetricFactory, Metrics
from ropewalk.server.page.stats import read_stats
from ropewalk.server.replicas.fleet_metrics import FleetMetrics, MergedPages, Pages
from ropewalk.server.replicas.remote_engine import CONTINUED, LOST_REASONS

CONFIG = EngineConfig(kv_cache_tokens=1024, max_model_len=128, page_size=16)
TIER = Tier(128, 1.0, Profile(Unscaled()))
REQUEST = Request(
    "r", (1, 2, 3), SamplingParams(), Placement("m", TIER, (), "fixed", None, 128), ""
)
STEPS, USAGE = "ropewalk_steps_total", "ropewalk_kv_cache_usage_ratio"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Replica:
    """The metrics of an engine."""

    def __init__(self) -> None:
        self.metrics = Metrics(MetricFactory(), [64], CONFIG, ["queue_full"])

    def step(self, number: int = 1, num_used_pages: int = 32) -> None:
        """Make steps, and the first token of a request."""
        for _ in range(number):
            self.metrics.timed({"forward": 0.25})
        self.metrics.started(REQUEST, 0, 0.5)
        self.metrics.first_token(REQUEST, 0.5, 0.25)
        self.metrics.finished(REQUEST, TIER, FinishReason.LENGTH, 1, 0.5)
        self.metrics.stepped(1, 2, num_used_pages)

    def page(self) -> Sequence[Metric]:
        """The page that the API receives."""
        return tuple(self.metrics.collect())


def values(merged: MergedPages) -> Series:
    """All series."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in merged.collect()
        for sample in family.samples
    }


def of(series: Series, name: str) -> dict[str, float]:
    """The sum of a name's values by replica."""
    found: dict[str, float] = defaultdict(float)
    for (each, labels), value in series.items():
        if each == name:
            found[dict(labels)["replica"]] += value
    return found


def test_a_new_replica_goes_on_with_the_counts_of_one_that_has_gone() -> None:
    """So `rate` sees neither a jump nor a fall; the gauges are those of the new one."""
    merged, replicas = MergedPages(), [Replica() for _ in range(3)]
    for replica in replicas:
        replica.step(5)
    first, second, third = (each.page() for each in replicas)
    merged.update({"a": first, "b": second}, ["a", "b"])
    assert of(values(merged), STEPS) == {"0": 5, "1": 5}
    merged.update({"b": second}, ["b"])
    assert of(values(merged), STEPS) == {"0": 5, "1": 5}
    assert of(values(merged), USAGE) == {"1": 0.5}
    merged.update({"b": second, "c": third}, ["b", "c"])
    assert of(values(merged), STEPS) == {"0": 10, "1": 5}
    assert of(values(merged), USAGE) == {"0": 0.5, "1": 0.5}
    assert of(values(merged), "ropewalk_request_queue_seconds_sum") == {"0": 1.0, "1": 0.5}


def test_a_replica_that_was_away_has_its_own_place_again() -> None:
    """A restarted controller of Ray forgets all replicas for a moment."""
    merged, replica = MergedPages(), Replica()
    replica.step(5)
    merged.update({"a": replica.page()}, ["a"])
    merged.update({}, [])
    assert of(values(merged), USAGE) == {}
    replica.step(2)
    merged.update({"a": replica.page()}, ["a"])
    assert of(values(merged), STEPS) == {"0": 7}
    assert of(values(merged), USAGE) == {"0": 0.5}


def test_a_late_page_of_a_replica_that_has_gone_counts_once() -> None:
    """Another scrape was faster, and saw the replica that took its place."""
    merged, gone, new = MergedPages(), Replica(), Replica()
    gone.step(5)
    late = gone.page()
    merged.update({"a": late}, ["a"])
    merged.update({"b": new.page()}, ["b"])
    merged.update({"a": late}, ["b"])
    assert of(values(merged), STEPS) == {"0": 5}


EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "replace", "remove", "slow", "scrape"]), st.integers(0, 2)),
    max_size=20,
)


@settings(max_examples=50, deadline=None)
@given(EVENTS)
def test_no_counter_falls_and_sums_are_right(events: list[tuple[str, int]]) -> None:
    """Replicas come and go between two scrapes, and each was scraped before it went."""
    merged, replicas, num_steps = MergedPages(), dict[str, Replica](), 0
    places: dict[int, str] = {}
    before: Series = {}

    def scrape(*slow: str) -> None:
        nonlocal before
        pages = {name: each.page() for name, each in replicas.items() if name not in slow}
        merged.update(pages, list(replicas))
        now = values(merged)
        counts = ("_total", "_bucket", "_count", "_sum")
        for key, value in before.items():
            if key[0].endswith(counts):
                assert now[key] >= value
        before = now

    for at, (event, number) in enumerate(events):
        scrape()
        name = places.get(number)
        if event == "replace":
            replicas.pop(name or "", None)
            places[number] = f"{at}"
            replicas[f"{at}"] = Replica()
        elif name in replicas:
            assert name is not None
            if event == "step":
                replicas[name].step()
                num_steps += 1
            elif event == "remove":
                del replicas[name]
            elif event == "slow":
                scrape(name)
    scrape()
    assert sum(of(before, STEPS).values()) == num_steps
    assert set(of(before, USAGE).values()) <= {0.0, 0.5}
    assert len(of(before, USAGE)) == len(replicas)
    assert len(of(before, STEPS)) <= 3


class Fleet:
    """The metrics of an API process on an event loop of their own, over replicas."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self.replicas = replicas
        self.delay_s = 0.0
        self.metrics = FleetMetrics(
            lambda _, call: call(), MetricFactory(), [64], CONFIG, ["queue_full"]
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._follow(), self.loop).result()

    async def _follow(self) -> None:
        self.metrics.follow(self._pages, lambda: tuple(self.replicas))

    async def _pages(self) -> Pages:
        await asyncio.sleep(self.delay_s)
        return {name: each.page() for name, each in self.replicas.items()}

    def page(self) -> dict[str, Metric]:
        """The families of the text page."""
        text = self.metrics.render().decode()
        families = list(text_string_to_metric_families(text))
        assert len({each.name for each in families}) == len(families)
        return {each.name: each for each in families}

    def close(self) -> None:
        """End the event loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two replicas which have each made three steps."""
    fleet = Fleet({"a": Replica(), "b": Replica()})
    for each in fleet.replicas.values():
        each.step(3)
    yield fleet
    fleet.close()


def total(family: Metric, name: str | None = None) -> float:
    """The sum of a family's samples of one name."""
    name = name or f"{family.name}_total"
    return sum(sample.value for sample in family.samples if sample.name == name)


def test_the_text_page_parses_and_every_series_of_an_engine_names_its_replica(
    fleet: Fleet,
) -> None:
    """The API's own series have no such label."""
    page = fleet.page()
    assert total(page["ropewalk_steps"]) == 6
    assert {sample.labels["replica"] for sample in page["ropewalk_steps"].samples} == {"0", "1"}
    own = page["ropewalk_requests_rejected"].samples + page["ropewalk_build_info"].samples
    assert own
    assert not any("replica" in sample.labels for sample in own)
    assert total(page["ropewalk_replicas_ready"], "ropewalk_replicas_ready") == 2
    assert total(page["ropewalk_kv_cache_tokens"], "ropewalk_kv_cache_tokens") == 2048
    queued = page["ropewalk_request_queue_seconds"].samples
    assert {sample.labels["model_name"] for sample in queued} == {"m"}


def test_the_memory_of_the_api_and_of_every_replica_is_in_one_family(fleet: Fleet) -> None:
    """The API's own has no label `replica`; a second family of the name would be no valid page."""
    memory = fleet.page()["process_resident_memory_bytes"].samples
    assert [sample.labels.get("replica") for sample in memory] == [None, "0", "1"]
    assert all(sample.value > 2**20 for sample in memory)


def test_events_that_clients_see_are_counted_by_the_api_alone(fleet: Fleet) -> None:
    """The replicas count it, too, but each lost request more than once."""
    page = fleet.page()
    assert not page["ropewalk_requests"].samples
    for name in ("ropewalk_prompt_tokens", "ropewalk_generated_tokens"):
        assert total(page[name]) == 0
    fleet.metrics.started(REQUEST, 2, 0.0)
    fleet.metrics.first_token(REQUEST, 0.5, 0.5)
    fleet.metrics.finished(REQUEST, TIER, FinishReason.LENGTH, 1, 0.5)
    page = fleet.page()
    assert total(page["ropewalk_requests"]) == 1
    assert total(page["ropewalk_prompt_tokens"]) == 3
    assert total(page["ropewalk_prompt_tokens_cached"]) == 2
    assert total(page["ropewalk_generated_tokens"]) == 1
    first_token = page["ropewalk_time_to_first_token_seconds"]
    assert total(first_token, "ropewalk_time_to_first_token_seconds_count") == 1


def test_lost_replicas_are_counted_by_reason_and_outcome(fleet: Fleet) -> None:
    """Every series exists from the start."""
    page = fleet.page()
    lost = page["ropewalk_replica_lost_requests"]
    assert {each.labels["reason"] for each in lost.samples} == set(LOST_REASONS)
    outcomes = page["ropewalk_replica_continuations"].samples
    assert {each.labels["outcome"] for each in outcomes} == set(CONTINUED)
    fleet.metrics.counts.lost("died", has_begun=True)
    fleet.metrics.counts.continued("ok")
    fleet.metrics.counts.predicted.inc(64)
    page = fleet.page()
    (sample,) = (each for each in page["ropewalk_replica_lost_requests"].samples if each.value)
    assert sample.labels == {"reason": "died", "kind": "continuation"}
    assert total(page["ropewalk_replica_continuations"]) == 1
    assert total(page["ropewalk_replica_predicted_cached_tokens"]) == 64


def test_replicas_that_do_not_answer_in_time_keep_their_last_numbers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page comes without them."""
    assert total(fleet.page()["ropewalk_steps"]) == 6
    fleet.replicas["a"].step()
    fleet.delay_s = 30.0
    with monkeypatch.context() as briefly:
        briefly.setattr("ropewalk.server.replicas.fleet_metrics._COLLECT_S", 0.05)
        assert total(fleet.page()["ropewalk_steps"]) == 6
    fleet.delay_s = 0.0
    assert total(fleet.page()["ropewalk_steps"]) == 7


def test_pages_that_are_asked_for_at_one_time_are_whole(fleet: Fleet) -> None:
    """Prometheus and a dashboard may ask together while a replica is replaced."""
    assert total(fleet.page()["ropewalk_steps"]) == 6
    found: list[float] = []

    def ask() -> None:
        found.extend(total(fleet.page()["ropewalk_steps"]) for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for each in threads:
        each.start()
    fleet.replicas = {"b": fleet.replicas["b"], "c": Replica()}
    for each in threads:
        each.join()
    assert found == [6.0] * 15


def test_stats_add_the_replicas_up(fleet: Fleet) -> None:
    """A page or a terminal draws the whole fleet; the usage is the mean."""
    stats = read_stats(fleet.metrics)
    assert (stats.requests_running, stats.requests_waiting) == (2, 4)
    assert stats.kv_cache_tokens == 2048
    assert stats.kv_cache_usage_ratio == 0.5
    assert stats.kv_disk is None
    fleet.replicas = {}
    assert read_stats(fleet.metrics).kv_cache_usage_ratio == 0.0
