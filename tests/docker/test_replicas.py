"""The files for several servers fit those for one, each other, and the schemas that exist."""

import re
import tomllib
from pathlib import PurePosixPath
from typing import Any

import yaml

from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.startup.lifecycle import _FAREWELL_S
from tests.docker.files import DOCKER, OBJECTS, check_objects, patched, read

COMPOSE, ALONE = read("compose.replicas.yaml"), read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NAMES = sorted(name for name in SERVICES if name.startswith("server-"))


PATCH = read("kubernetes.replicas.yaml")
DEPLOYMENT = patched(OBJECTS["Deployment"], PATCH)
RAY = read("kuberay.yaml")


def test_nginx_and_prometheus_know_every_server() -> None:
    """Their addresses are the services' names, with the port of the image."""
    addresses = [f"{name}:8000" for name in NAMES]
    assert len(addresses) == 2
    text = (DOCKER / "nginx.conf").read_text()
    assert re.findall(r"\bserver (\S+:\d+)", text) == addresses
    single, several = read("prometheus.yml"), read("prometheus.replicas.yml")
    (scrape,) = several["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": addresses}]
    scrape["static_configs"] = single["scrape_configs"][0]["static_configs"]
    assert several == single, "all but the targets is the same"


def test_the_servers_are_equal_and_reached_through_nginx_only() -> None:
    """They are those of compose.yaml but for the port that each of them would publish."""
    alone = {name: each for name, each in ALONE["services"]["server"].items() if name != "ports"}
    assert [SERVICES[name] for name in NAMES] == [alone, alone]
    (port,) = SERVICES["nginx"]["ports"]
    (listen,) = re.findall(r"\blisten (\d+);", (DOCKER / "nginx.conf").read_text())
    assert port == f"127.0.0.1:8000:{listen}"
    assert set(SERVICES["nginx"]["depends_on"]) == set(NAMES)


def test_other_services_are_those_of_one_server() -> None:
    """The included file of nginx.conf is where the image's own nginx.conf looks."""
    inside = PurePosixPath(SERVICES["nginx"]["volumes"][0].split(":")[1])
    assert inside.match("/etc/nginx/conf.d/*.conf")
    assert SERVICES["grafana"] == {"extends": {"file": "compose.yaml", "service": "grafana"}}
    for name in ("image", "healthcheck", "ports"):
        assert SERVICES["prometheus"][name] == ALONE["services"]["prometheus"][name]


def test_the_patched_deployment_is_one_that_the_cluster_accepts() -> None:
    """Unknown fields of the patch are refused."""
    check_objects(DEPLOYMENT)


def test_the_patch_for_a_gpu_gives_one() -> None:
    """The server sizes its cache by the GPU, as no setting names one."""
    given = patched(OBJECTS["Deployment"], read("kubernetes.gpu.yaml"))
    check_objects(given)
    pod = given["spec"]["template"]["spec"]
    (taint,), (server,) = pod["tolerations"], pod["containers"]
    assert server["resources"]["limits"][taint["key"]] == "1"
    assert server["env"][-1] == {"name": "ROPEWALK_DEVICE", "value": "cuda"}
    settings = yaml.safe_load(OBJECTS["ConfigMap"]["data"]["ropewalk.yaml"])
    assert not [name for name in settings if name.startswith("kv_cache")]


def test_the_patch_changes_the_pod_by_its_end_only() -> None:
    """A pod that ends answers on until no node sends it connections, and drains after that."""
    assert DEPLOYMENT["spec"]["replicas"] == 2
    assert DEPLOYMENT["spec"]["strategy"]["type"] == "RollingUpdate"
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    program, seconds = server["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    readiness = server["readinessProbe"]
    assert readiness["httpGet"]["path"] == "/ready"
    settings = yaml.safe_load(OBJECTS["ConfigMap"]["data"]["ropewalk.yaml"])
    drain = settings["shutdown_timeout_seconds"] + _FAREWELL_S
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + drain
    del server["lifecycle"]
    assert [server] == OBJECTS["Deployment"]["spec"]["template"]["spec"]["containers"]


def test_the_ray_service_starts_our_application_on_every_node() -> None:
    """serveConfigV2 is YAML within YAML; the operator's schema is not at hand."""
    assert (RAY["apiVersion"], RAY["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(RAY["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "ropewalk.server.ray_app:build"
    assert set(application["args"]) == {"model", "replicas"}
    cluster = RAY["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert application["args"]["replicas"] == workers["replicas"], "one on each node"
    for group in (cluster["headGroupSpec"], workers):
        values = group["rayStartParams"].values()
        assert all(isinstance(value, str) for value in values), "flags of `ray start`"


def test_the_ray_services_pods_are_ones_that_the_cluster_accepts() -> None:
    """The operator's schema is not at hand; a pod template is the cluster's own."""
    cluster = RAY["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        check_objects(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        )
    images = {each["image"] for group in groups for each in group["template"]["spec"]["containers"]}
    assert len(images) == 1, "Ray's versions must be equal"


def test_the_file_for_ray_changes_the_server_and_what_is_scraped() -> None:
    """It installs an extra that exists, and sets variables that are settings."""
    ray = read("compose.ray.yaml")
    assert list(ray["services"]) == ["server", "prometheus"]
    server = ray["services"]["server"]
    (scrape,) = read("prometheus.router.yml")["scrape_configs"]
    (name,) = server["networks"]["default"]["aliases"]
    assert scrape["static_configs"] == [{"targets": [f"{name}:8000"]}]
    (volume,) = ray["services"]["prometheus"]["volumes"]
    assert volume.split(":")[1] in " ".join(ALONE["services"]["prometheus"]["volumes"])
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]
    assert server["build"]["args"]["EXTRAS"] in project["optional-dependencies"]
    assert "ARG EXTRAS=" in (DOCKER.parent / "Dockerfile").read_text().splitlines()
    for name, value in server["environment"].items():
        assert load_settings({name.removeprefix("ROPEWALK_").lower(): value}).replicas
    default = ServeSettings.model_fields["shutdown_timeout_seconds"].default
    assert int(server["stop_grace_period"].removesuffix("s")) > default + 2 * _FAREWELL_S
