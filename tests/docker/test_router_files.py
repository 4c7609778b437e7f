"""The files for a router and three servers fit the router, the servers and the schemas.

No container engine is at hand, so the commands of the compose file run here as processes. The name
of the service, which stands for its containers there, is replaced by their addresses.
"""

import re
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import yaml

from ropewalk.server.settings.load import SettingsError
from ropewalk.server.settings.route_settings import RouteSettings, load_route_settings
from ropewalk.server.startup.lifecycle import _FAREWELL_S
from tests.docker.dockerfile import instructions
from tests.docker.real_prometheus import DOCKER
from tests.docker.test_kubernetes import OBJECTS, missing
from tests.docker.test_prometheus import promtool
from tests.docker.test_replicas import patched, read
from tests.servers.processes import running_server, without_replicas

COMPOSE, ALONE = read("compose.router.yaml"), read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PARTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((DOCKER / "kubernetes.router.yaml").read_text(encoding="utf-8"))
)
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


@without_replicas
def test_the_commands_of_the_compose_file_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three servers and a router, with the variables of the file and none of its flags changed."""
    monkeypatch.setenv("ROPEWALK_ROUTER_KEY", "a-key-of-the-compose-file")
    for each in ("server", "router"):
        (variable,) = SERVICES[each]["environment"]
        assert variable == "ROPEWALK_ROUTER_KEY"
    assert "command" not in SERVICES["server"]
    assert instructions("CMD") == ['["serve"]']
    name, address = SERVICES["router"]["command"]
    with ExitStack() as stack:
        small = ("--threads", "1", "--kv-cache-tokens", "4096")
        num = SERVICES["server"]["deploy"]["replicas"]
        urls = [stack.enter_context(running_server(*small)).url for _ in range(num)]
        assert address == "http://server:8000"
        router = stack.enter_context(running_server(*urls, subcommand=name))
        ready = 'ropewalk_router_servers{state="ready"} 3.0'
        with httpx.Client(base_url=router.url, timeout=60) as client:
            while ready not in client.get("/metrics").text:
                assert client.get("/live").status_code == 200
            assert client.get("/health").status_code == 200, "the check of the image"
            body = {"prompt": "import os", "max_tokens": 4}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert "go on elsewhere" in router.banner


def test_the_compose_file_is_that_of_one_server_with_a_router_in_front() -> None:
    """The servers publish no port, and have the router's key."""
    alone = {name: each for name, each in ALONE["services"]["server"].items() if name != "ports"}
    server = dict(SERVICES["server"])
    assert server.pop("deploy") == {"replicas": 3}
    assert server.pop("environment") == SERVICES["router"]["environment"]
    assert server == alone
    assert SERVICES["router"]["image"] == server["image"]
    assert SERVICES["router"]["ports"] == ALONE["services"]["server"]["ports"]
    for name in ("image", "healthcheck", "ports"):
        assert SERVICES["prometheus"][name] == ALONE["services"]["prometheus"][name]
    for volume in SERVICES["prometheus"]["volumes"]:
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (DOCKER / source).is_file()
    single, several = read("prometheus.yml"), read("prometheus.router.yml")
    (scrape,) = several["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["router:8000"]}]
    (discovery,) = scrape.pop("http_sd_configs")
    assert discovery["url"] == "http://router:8000/metrics/servers"
    scrape["static_configs"] = single["scrape_configs"][0]["static_configs"]
    assert several == single, "all but the targets is the same"


def test_promtool_accepts_the_configuration() -> None:
    promtool("check", "config", str(DOCKER / "prometheus.router.yml"))


def test_the_cluster_accepts_the_objects() -> None:
    """A wrong field is noticed."""
    try:
        import kubernetes_validate
    except ImportError:
        missing("kubernetes-validate")
    newest = kubernetes_validate.latest_version()
    for each in (*PARTS, PATCHED):
        assert newest.startswith(kubernetes_validate.validate(each, newest, strict=True))
    wrong = patched(DEPLOYMENT, {"spec": {"template": {"spec": {"serviceLinks": False}}}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, newest, strict=True)


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
    names = ("scaling-out.md", "operating.md")
    pages = [(DOCKER.parent / "docs/guide" / each).read_text() for each in names]
    for variable in re.findall(r"\$\{(\w+)", (DOCKER / "compose.router.yaml").read_text()):
        assert variable in pages[0] + pages[1]
