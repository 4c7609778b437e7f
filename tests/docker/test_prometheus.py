"""A real Prometheus scrapes a real server under load: the dashboard's queries have answers."""

import bisect
import json
import math
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.docker.dashboard import QUERIES, Query
from tests.docker.files import DOCKER
from tests.docker.load import MODELS, Measured, send_load
from tests.docker.real_prometheus import Prometheus, running_prometheus, tool
from tests.doubles.waiting import wait_until
from tests.servers.processes import Server, running_server

pytestmark = pytest.mark.alone

ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}


@dataclass(frozen=True)
class Observed:
    """A server after its load, its clients' measurements, and the Prometheus that scraped it."""

    server: Server
    prometheus: Prometheus
    measured: Measured


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A server scraped from before the first request to after the last."""
    tool("prometheus")  # skip before a server is started
    folder = tmp_path_factory.mktemp("prometheus")
    static = {"name": "static", "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    names = [{"name": "dynamic"}, {**static, "rope_policy": "fixed"}]
    assert {each["name"] for each in names} == set(MODELS)
    with (
        running_server("--deployments", json.dumps(names)) as server,
        running_prometheus(server.url.removeprefix("http://"), folder) as prometheus,
    ):
        wait_until(lambda: prometheus.now("ropewalk_requests_running") != [], "scraped")
        measured = Measured()

        def is_counted() -> bool:
            total = prometheus.now("sum(ropewalk_requests_total)")
            return total[0][1] == measured.num_requests()

        # A rate needs a scrape of each series before its last requests, also on a busy machine.
        for seconds in (0, 5):
            measured.add(send_load(server, seconds))
            wait_until(is_counted, f"counted: {measured.num_requests()} requests")
        yield Observed(server, prometheus, measured)


def promtool(*arguments: str, page: bytes | None = None) -> None:
    """Run promtool to its end; any complaint is an error."""
    ended = subprocess.run(
        [tool("promtool"), *arguments], input=page, capture_output=True, timeout=60, check=False
    )
    said = (ended.stdout + ended.stderr).decode()
    assert ended.returncode == 0, said
    assert "lint error" not in said, said


def test_the_configuration_and_the_rules_are_valid() -> None:
    """Promtool reads both files."""
    promtool("check", "config", str(DOCKER / "prometheus.yml"))
    promtool("check", "rules", str(DOCKER / "alerts.yml"))


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    """Promtool's unit tests cover every alert."""
    path = Path(__file__).with_name("alerts_test.yml")
    promtool("test", "rules", str(path))
    text = path.read_text()
    assert [name for name in ALERTS if f'{{alertname="{name}"}}' not in text] == []


def test_promtool_has_no_complaint_about_the_metrics_page(observed: Observed) -> None:
    """Promtool checks names, units and help texts."""
    promtool("check", "metrics", page=httpx.get(f"{observed.server.url}/metrics").content)


def test_the_target_is_up(observed: Observed) -> None:
    """The target's job has the name that the configuration gives it."""
    (target,) = observed.prometheus.api("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert target["labels"]["job"] == "ropewalk"


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_every_query_of_the_dashboard_has_data(observed: Observed, query: Query) -> None:
    """Each query is sent in Grafana's form, and at least one series has a number."""
    expression = query.substituted()
    if "ropewalk_kv_disk_" in expression or "ropewalk_kv_offload_" in expression:
        pytest.skip("this server has no pages outside of its cache")
    if query.is_instant:
        values = [value for _, value in observed.prometheus.now(expression)]
    else:
        series = observed.prometheus.over(expression, 60)
        values = [value for _, each in series for value in each]
    assert any(math.isfinite(value) for value in values), expression


def test_first_token_times_by_context_are_those_that_clients_saw(observed: Observed) -> None:
    """The 95th percentile exists for every bucket under load and for no other."""

    def by_context(panel: str) -> dict[str, float]:
        (query,) = (each for each in QUERIES if each.panel == panel)
        series = observed.prometheus.now(query.substituted())
        return {labels["context_bucket"]: seconds for labels, seconds in series}

    found = by_context("Time to first token, p95")
    measured = observed.measured
    assert set(found) == set(measured.first_token_s)
    steps = observed.prometheus.now("count by (le) (ropewalk_time_to_first_token_seconds_bucket)")
    bounds = sorted(float(labels["le"]) for labels, _ in steps)
    for bucket, seconds in found.items():
        # The histogram says in which of its bounds a time lies, not where; the client's clock runs
        # longer than the server's, by HTTP and by its own share of the two cores.
        most = bounds[bisect.bisect_left(bounds, measured.most_s(bucket))]
        least = 0.05 * statistics.median(measured.first_token_s[bucket])
        assert least < seconds <= most, bucket
    half = by_context("Time to first token, p50")
    assert half["2048"] > half["16"], "a long prompt takes longer"


def test_deployments_can_be_compared_by_context_length(observed: Observed) -> None:
    """The 95th percentile exists for each deployment and bucket that had load, and no other."""
    sent = observed.measured.num_sent
    assert {model for model, _ in sent} == set(MODELS)

    def by_model(expression: str) -> dict[tuple[str, str], float]:
        found = observed.prometheus.now(expression)
        return {(each["model_name"], each["context_bucket"]): value for each, value in found}

    assert by_model("ropewalk_time_to_first_token_seconds_count") == sent
    (panel,) = (each for each in QUERIES if each.panel == "Time to first token by model, p95")
    found = by_model(panel.substituted())
    assert found.keys() == sent.keys()
    most = max(max(each) for each in observed.measured.whole_s.values())
    assert all(0 < seconds < 10 * most for seconds in found.values()), found
    page = (DOCKER.parent / "docs/reference/metrics.md").read_text()
    documented = re.search(r"histogram_quantile\(0.95, sum by \(context_bucket, model_name.*", page)
    assert documented is not None
    assert by_model(documented[0]).keys() == sent.keys()


def test_the_memory_of_the_process_is_scraped(observed: Observed) -> None:
    """A dashboard of any Prometheus client finds it under this name."""
    ((labels, value),) = observed.prometheus.now('process_resident_memory_bytes{job="ropewalk"}')
    assert labels["instance"] == observed.server.url.removeprefix("http://")
    assert value > 100 * 2**20


def test_refusals_are_seen(observed: Observed) -> None:
    """The counter equals the number of refused requests."""
    counted = observed.prometheus.now(
        'ropewalk_requests_rejected_total{reason="context_length_exceeded"}'
    )
    assert [value for _, value in counted] == [observed.measured.num_refused]


def test_no_alert_fires_on_a_healthy_server(observed: Observed) -> None:
    """Every rule is evaluated without an error, and none is pending."""

    def rules() -> list[dict[str, str]]:
        (group,) = observed.prometheus.api("rules")["groups"]
        rules: list[dict[str, str]] = group["rules"]
        return rules

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "evaluated")
    assert {rule["name"] for rule in rules()} == set(ALERTS)
    for rule in rules():
        assert (rule["health"], rule["state"]) == ("ok", "inactive"), rule
