"""The files for a router and three servers fit the router, the servers and the schemas."""

from typing import Any

import pytest

from ropewalk.server.settings.load import SettingsError
from ropewalk.server.settings.route_settings import RouteSettings, load_route_settings
from ropewalk.server.startup.lifecycle import _FAREWELL_S
from tests.docker.dockerfile import instructions
from tests.docker.files import OBJECTS, check_objects, objects_of, patched, read

COMPOSE, ALONE = read("compose.router.yaml"), read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PARTS = objects_of("kubernetes.router.yaml")
SECRET, SERVERS, DEPLOYMENT, FRONT = PARTS
POD = DEPLOYMENT["spec"]["template"]["spec"]
(ROUTER,) = POD["containers"]
PATCHED = patched(OBJECTS["Deployment"], read("kubernetes.router-servers.yaml"))


def settings_of(command: list[str]) -> RouteSettings:
    """What `ropewalk route` makes of its arguments."""
    name, address, *rest = command
    assert name == "route"
    flags = {
        each.removeprefix("--"): value for each, value in zip(rest[::2], rest[1::2], strict=True)
    }
    return load_route_settings({**flags, "servers": (address,)})


def test_the_compose_file_is_that_of_one_server_with_a_router_in_front() -> None:
    """The servers publish no port, and have the router's key."""
    alone = {name: each for name, each in ALONE["services"]["server"].items() if name != "ports"}
    server = dict(SERVICES["server"])
    assert server.pop("deploy") == {"replicas": 3}
    assert server.pop("environment") == SERVICES["router"]["environment"]
    assert list(SERVICES["router"]["environment"]) == ["ROPEWALK_ROUTER_KEY"]
    assert settings_of(SERVICES["router"]["command"]).servers == ("http://server:8000",)
    assert instructions("CMD") == ['["serve"]']
    assert server == alone
    assert SERVICES["router"]["image"] == server["image"]
    assert SERVICES["router"]["ports"] == ALONE["services"]["server"]["ports"]
    for name in ("image", "healthcheck", "ports"):
        assert SERVICES["prometheus"][name] == ALONE["services"]["prometheus"][name]
    single, several = read("prometheus.yml"), read("prometheus.router.yml")
    (scrape,) = several["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["router:8000"]}]
    (discovery,) = scrape.pop("http_sd_configs")
    assert discovery["url"] == "http://router:8000/metrics/servers"
    scrape["static_configs"] = single["scrape_configs"][0]["static_configs"]
    assert several == single, "all but the targets is the same"


def test_the_cluster_accepts_the_objects() -> None:
    """The patched one for the servers is among them."""
    check_objects(*PARTS, PATCHED)


def test_objects_name_each_other() -> None:
    """The router finds the servers' pods by the name of a Service without an address."""
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels == FRONT["spec"]["selector"]
    assert SERVERS["spec"]["clusterIP"] == "None"
    assert SERVERS["spec"]["selector"] == PATCHED["spec"]["template"]["metadata"]["labels"]
    settings = settings_of(ROUTER["args"])
    (port,) = SERVERS["spec"]["ports"]
    assert settings.servers == (f"http://{SERVERS['metadata']['name']}:{port['port']}",)
    (own,) = ROUTER["ports"]
    assert settings.port == own["containerPort"]
    (server,) = PATCHED["spec"]["template"]["spec"]["containers"]
    of_server = [each for each in server["env"] if each["name"] == "ROPEWALK_ROUTER_KEY"]
    assert of_server == ROUTER["env"]
    reference = ROUTER["env"][0]["valueFrom"]["secretKeyRef"]
    assert reference["name"] == SECRET["metadata"]["name"]
    assert reference["key"] in SECRET["stringData"]
    assert PATCHED["spec"]["replicas"] == 3


def test_the_shipped_secret_starts_no_router() -> None:
    """A key that everybody knows would be worse than none."""
    with pytest.raises(SettingsError, match="router_key: must have at least 16 characters"):
        load_route_settings({"servers": ("http://a:1",), **SECRET["stringData"]})


def test_the_grace_period_covers_the_drain() -> None:
    """So does that of the compose file."""
    program, seconds = ROUTER["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    default = RouteSettings.model_fields["shutdown_timeout_seconds"].default
    assert POD["terminationGracePeriodSeconds"] > int(seconds) + default + _FAREWELL_S
    stop = SERVICES["router"]["stop_grace_period"]
    assert int(stop.removesuffix("s")) > default + _FAREWELL_S
    assert not POD["enableServiceLinks"]
    assert POD["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/ready"
