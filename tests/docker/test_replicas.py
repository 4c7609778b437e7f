"""The files for several servers fit those for one, each other, and the schemas that exist."""

import copy
import re
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.startup.lifecycle import _FAREWELL_S
from tests.docker.real_prometheus import DOCKER
from tests.docker.test_kubernetes import OBJECTS, missing
from tests.docker.test_prometheus import promtool


def read(name: str) -> Any:
    """A YAML file of docker/."""
    return yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))


COMPOSE, ALONE = read("compose.replicas.yaml"), read("compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NAMES = sorted(name for name in SERVICES if name.startswith("server-"))


def patched(whole: Any, patch: Any) -> Any:
    """An object after a strategic merge patch: parts of a list with the same name are merged."""
    if isinstance(patch, dict) and isinstance(whole, dict):
        merged = {**whole, **{name: patched(whole.get(name), each) for name, each in patch.items()}}
        if "type" in patch and patch["type"] != whole.get("type"):
            return patch  # another strategy keeps nothing of the one before
        return merged
    if isinstance(patch, list) and isinstance(whole, list) and "name" in patch[0]:
        by_name = {each["name"]: each for each in whole}
        for each in patch:
            by_name[each["name"]] = patched(by_name.get(each["name"]), each)
        return list(by_name.values())
    return copy.deepcopy(patch)


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


def test_promtool_accepts_the_configuration() -> None:
    """It also reads the rules beside the file."""
    promtool("check", "config", str(DOCKER / "prometheus.replicas.yml"))


def test_the_servers_are_equal_and_reached_through_nginx_only() -> None:
    """They are those of compose.yaml but for the port that each of them would publish."""
    alone = {name: each for name, each in ALONE["services"]["server"].items() if name != "ports"}
    assert [SERVICES[name] for name in NAMES] == [alone, alone]
    (port,) = SERVICES["nginx"]["ports"]
    (listen,) = re.findall(r"\blisten (\d+);", (DOCKER / "nginx.conf").read_text())
    assert port == f"127.0.0.1:8000:{listen}"
    assert set(SERVICES["nginx"]["depends_on"]) == set(NAMES)


def test_mounts_exist_and_other_services_are_those_of_one_server() -> None:
    """The included file of nginx.conf is where the image's own nginx.conf looks."""
    volumes = [each for name in ("nginx", "prometheus") for each in SERVICES[name]["volumes"]]
    for source, _, mode in (each.split(":") for each in volumes if each.startswith(".")):
        assert (DOCKER / source).is_file()
        assert mode == "ro"
    inside = PurePosixPath(SERVICES["nginx"]["volumes"][0].split(":")[1])
    assert inside.match("/etc/nginx/conf.d/*.conf")
    assert SERVICES["grafana"] == {"extends": {"file": "compose.yaml", "service": "grafana"}}
    for name in ("image", "healthcheck", "ports"):
        assert SERVICES["prometheus"][name] == ALONE["services"]["prometheus"][name]
    assert set(COMPOSE["volumes"]) == set(ALONE["volumes"])


def test_variables_in_the_compose_file_are_settings_and_are_documented() -> None:
    """Commented ones are included."""
    text = (DOCKER / "compose.replicas.yaml").read_text()
    used = set(re.findall(r"ROPEWALK_[A-Z_]+", text))
    assert used
    assert used <= {f"ROPEWALK_{name.upper()}" for name in ServeSettings.model_fields}
    page = (DOCKER.parent / "docs/guide/operating.md").read_text()
    assert all(f"`{name}`" in page for name in re.findall(r"\$\{(\w+)", text))


def test_the_patched_deployment_is_one_that_the_cluster_accepts() -> None:
    """A wrong field of the patch is noticed."""
    try:
        import kubernetes_validate
    except ImportError:
        missing("kubernetes-validate")
    newest = kubernetes_validate.latest_version()
    assert newest.startswith(kubernetes_validate.validate(DEPLOYMENT, newest, strict=True))
    wrong = patched(DEPLOYMENT, {"spec": {"template": {"spec": {"topologySpread": []}}}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, newest, strict=True)


def test_the_patch_for_a_gpu_gives_one_and_changes_nothing_else() -> None:
    """Probes and security stay. The server sizes its cache by the GPU, as no setting names one."""
    given = patched(OBJECTS["Deployment"], read("kubernetes.gpu.yaml"))
    try:
        import kubernetes_validate
    except ImportError:
        missing("kubernetes-validate")
    newest = kubernetes_validate.latest_version()
    assert newest.startswith(kubernetes_validate.validate(given, newest, strict=True))
    pod, plain = (each["spec"]["template"]["spec"] for each in (given, OBJECTS["Deployment"]))
    (taint,) = pod.pop("tolerations")
    (server,), (before,) = pod["containers"], plain["containers"]
    limits = server.pop("resources")["limits"]
    assert limits[taint["key"]] == "1"
    assert int(limits["memory"].removesuffix("Gi")) > 8
    *others, device = server.pop("env")
    assert device == {"name": "ROPEWALK_DEVICE", "value": "cuda"}
    assert others == before["env"]
    same = {name: each for name, each in before.items() if name not in ("resources", "env")}
    assert {**pod, "containers": None} == {**plain, "containers": None}
    assert server == same
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
    try:
        import kubernetes_validate
    except ImportError:
        missing("kubernetes-validate")
    newest = kubernetes_validate.latest_version()
    cluster = RAY["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        assert newest.startswith(kubernetes_validate.validate(pod, newest, strict=True))
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
    source, mounted, _ = volume.split(":")
    assert (DOCKER / source).is_file()
    assert mounted in " ".join(ALONE["services"]["prometheus"]["volumes"])
    project = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]
    assert server["build"]["args"]["EXTRAS"] in project["optional-dependencies"]
    assert "ARG EXTRAS=" in (DOCKER.parent / "Dockerfile").read_text().splitlines()
    for name, value in server["environment"].items():
        assert load_settings({name.removeprefix("ROPEWALK_").lower(): value}).replicas
    default = ServeSettings.model_fields["shutdown_timeout_seconds"].default
    assert int(server["stop_grace_period"].removesuffix("s")) > default + 2 * _FAREWELL_S
