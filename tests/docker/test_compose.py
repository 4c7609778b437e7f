"""Compose files, provisioning and dashboard agree with each other and with the server."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from ropewalk.server.disk_metrics import DiskMetrics
from ropewalk.server.metrics import MetricFactory
from ropewalk.server.router.route_metrics import RouteMetrics
from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.startup.load_service import load_service
from tests.docker.dashboard import DASHBOARD, PANELS, QUERIES
from tests.docker.files import DOCKER, ROOT, read

FILES = sorted(path.name for path in DOCKER.glob("compose*.yaml"))
COMPOSE = read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def mounts(service: str) -> dict[PurePosixPath, Path]:
    """Folder or file in the container -> ours; named volumes are not among them."""
    volumes = [each.split(":") for each in SERVICES[service]["volumes"]]
    return {
        PurePosixPath(target): (DOCKER / source).resolve()
        for source, target, *_ in volumes
        if source.startswith(".")
    }


def ours(service: str, inside: str) -> Path:
    """The file of this repository behind a path in the container."""
    for target, source in mounts(service).items():
        if PurePosixPath(inside).is_relative_to(target):
            return source / PurePosixPath(inside).relative_to(target)
    raise AssertionError(f"{service} has nothing mounted at {inside}")


@pytest.mark.parametrize("name", FILES)
def test_mounts_exist_and_ports_are_on_the_loopback_address(name: str) -> None:
    """Mounted files are read-only, named volumes are declared, and no other machine has access."""
    for parts in read(name)["services"].values():
        for volume in parts.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert volume.endswith(":ro")
                assert (DOCKER / source).exists()
            else:
                assert source in read(name)["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in parts.get("ports", ()))


@pytest.mark.parametrize("name", FILES)
def test_variables_are_settings_and_are_documented(name: str) -> None:
    """Commented variables and those that the operator gives are included."""
    guide = ROOT / "docs/guide"
    pages = "".join((guide / each).read_text() for each in ("operating.md", "scaling-out.md"))
    text = (DOCKER / name).read_text()
    used = set(re.findall(r"ROPEWALK_[A-Z_]+", text))
    assert used
    assert used <= {f"ROPEWALK_{each.upper()}" for each in ServeSettings.model_fields}
    for variable in re.findall(r"\$\{(\w+)", text):
        assert f"`{variable}`" in pages or f"{variable}=" in pages


def test_a_service_that_others_wait_for_has_a_healthcheck() -> None:
    """The server's check is in its image."""
    waits = {
        name: condition
        for parts in SERVICES.values()
        for name, condition in parts.get("depends_on", {}).items()
    }
    assert set(waits) == {"server", "prometheus"}
    assert {each["condition"] for each in waits.values()} == {"service_healthy"}
    assert "healthcheck" in SERVICES["prometheus"]
    assert "HEALTHCHECK" in (ROOT / "Dockerfile").read_text()


def test_prometheus_finds_its_rules_and_the_server() -> None:
    """The address is the service's name and the port of the image."""
    inside = "/etc/prometheus/prometheus.yml"  # where the image looks
    assert ours("prometheus", inside) == DOCKER / "prometheus.yml"
    configuration = read("prometheus.yml")
    for rules in configuration["rule_files"]:
        assert ours("prometheus", f"/etc/prometheus/{rules}").is_file()
    (scrape,) = configuration["scrape_configs"]
    assert scrape["job_name"] == "ropewalk"
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]
    assert "ROPEWALK_PORT=8000" in (ROOT / "Dockerfile").read_text()


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    """Paths are the mounts', the address is the service's, the interval is the scrape's."""
    base = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load(ours("grafana", f"{base}/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    assert source["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]
    (provider,) = yaml.safe_load(ours("grafana", f"{base}/dashboards/ropewalk.yaml").read_text())[
        "providers"
    ]
    folder = ours("grafana", provider["options"]["path"])
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["ropewalk-replicas.json", "ropewalk.json"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert ours("grafana", home) == folder / "ropewalk.json"


def test_the_dashboards_variables_are_declared() -> None:
    """The dashboard uses each declared variable."""
    declared = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", str(PANELS)))
    assert used == declared


def test_every_metric_that_is_asked_for_exists(tmp_path: Path) -> None:
    """The queries of dashboard and alerts are compared with the pages of a server and a router."""
    flags = {"kv_disk": str(tmp_path / "kv"), "kv_disk_gib": "1"}  # it has metrics of its own
    text = load_service(load_settings(flags))[0].metrics.render().decode()
    text += RouteMetrics().page({}, {}).decode()
    on_a_gpu = MetricFactory()
    DiskMetrics(on_a_gpu, has_place=True, has_memory=True)
    text += generate_latest(on_a_gpu.registry).decode()
    there = set()
    for name, kind in re.findall(r"# TYPE (\w+) (\w+)", text):
        suffixes = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        there |= {name + suffix for suffix in suffixes}
    assert "ropewalk_time_to_first_token_seconds_bucket" in there
    expressions = [query.expression for query in QUERIES]
    for group in read("alerts.yml")["groups"]:
        expressions += [rule["expr"] for rule in group["rules"]]
    asked = set(re.findall(r"ropewalk_\w+", " ".join(expressions)))
    assert asked <= there
