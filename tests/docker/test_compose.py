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
from tests.docker.dashboard import DASHBOARD, PANELS, QUERIES, ROOT

DOCKER = ROOT / "docker"


def read(name: str) -> Any:
    """A YAML file of docker/."""
    return yaml.safe_load((DOCKER / name).read_text())


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


def test_every_mounted_file_exists_and_is_read_only() -> None:
    """Every named volume is declared as well."""
    for service, parts in SERVICES.items():
        assert all(source.exists() for source in mounts(service).values())
        for volume in parts["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert volume.endswith(":ro")
            else:
                assert source in COMPOSE["volumes"]


def test_ports_are_on_the_loopback_address() -> None:
    """Other machines of the network cannot reach the ports."""
    ports = [port for parts in SERVICES.values() for port in parts["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_variables_are_settings_and_are_documented() -> None:
    """Commented variables and those that the operator gives are included."""
    settings = {f"ROPEWALK_{name.upper()}" for name in ServeSettings.model_fields}
    page = (ROOT / "docs/guide/operating.md").read_text()
    for name in ("compose.yaml", "compose.gpu.yaml"):
        text = (DOCKER / name).read_text()
        used = set(re.findall(r"ROPEWALK_[A-Z_]+", text))
        assert used
        assert used <= settings
        for variable in re.findall(r"\$\{(\w+)", text):
            assert f"`{variable}`" in page


def test_the_gpu_file_changes_the_server_only() -> None:
    """Compose merges it with compose.yaml."""
    services = read("compose.gpu.yaml")["services"]
    assert set(services) == {"server"}
    (device,) = services["server"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


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


def test_grafanas_password_is_asked_for() -> None:
    """Grafana's password has no default, and anonymous visitors may only view."""
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_ADMIN_PASSWORD:?")
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


@pytest.mark.parametrize(
    "panel", [each for each in PANELS if each["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_a_panel_explains_itself(panel: dict[str, Any]) -> None:
    """A panel has a title, a description, a unit and a source; buckets sort as numbers."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)
    for each in (panel, *panel["targets"]):
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    if any("{{context_bucket}}" in target["legendFormat"] for target in panel["targets"]):
        # Grafana compares numbers inside names as numbers, in tables only.
        legend = panel["options"]["legend"]
        assert (legend["displayMode"], legend["sortBy"]) == ("table", "Name")


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
