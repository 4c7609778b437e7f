"""The manifest for a cluster and the systemd unit fit the server and each other."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import pytest
import yaml

from ropewalk.server.sentences import USAGE_ERROR
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.server.startup.gate import key_table_of
from ropewalk.server.startup.lifecycle import _FAREWELL_S
from tests.docker.dockerfile import instructions
from tests.docker.files import DOCKER, OBJECTS, ROOT, check_objects, objects_of
from tests.servers.processes import running_server
from tests.servers.programs import missing

MANIFEST = DOCKER / "kubernetes.yaml"
UNIT = DOCKER / "ropewalk.service"
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
SERVER = POD["containers"][0]
VOLUMES = {each["name"]: each for each in POD["volumes"]}
MOUNTS = {PurePosixPath(each["mountPath"]): each for each in SERVER["volumeMounts"]}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def mount_of(path: str) -> dict[str, Any]:
    """The mount that holds a path of the container."""
    found = [each for at, each in MOUNTS.items() if PurePosixPath(path).is_relative_to(at)]
    assert len(found) == 1, path
    return found[0]


def unpacked(folder: Path, key: str) -> Path:
    """The ConfigMap and the Secret as files, with a key, and the settings' paths among them."""
    settings: str = OBJECTS["ConfigMap"]["data"]["ropewalk.yaml"]
    keys: str = OBJECTS["Secret"]["stringData"]["keys"]
    (folder / "keys").write_text(keys.replace("example:", f"example:{key}"))
    (folder / "ropewalk.yaml").write_text(
        settings.replace("/etc/ropewalk/keys/keys", str(folder / "keys"))
    )
    return folder / "ropewalk.yaml"


def test_the_clusters_schemas_accept_every_object() -> None:
    """Unknown and misplaced fields are refused."""
    check_objects(*OBJECTS.values())


def test_objects_name_each_other() -> None:
    """Labels, volumes, keys of the maps and ports are those that exist."""
    assert list(OBJECTS) == ["ConfigMap", "Secret", "Deployment", "Service"]
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    assert {each["name"] for each in MOUNTS.values()} == set(VOLUMES)
    assert VOLUMES["settings"]["configMap"]["name"] == OBJECTS["ConfigMap"]["metadata"]["name"]
    assert VOLUMES["keys"]["secret"]["secretName"] == OBJECTS["Secret"]["metadata"]["name"]
    ports = {each["name"]: each["containerPort"] for each in SERVER["ports"]}
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert {SERVER[name]["httpGet"]["port"] for name in PROBES} <= set(ports)
    assert f"{ports['http']}" == SERVER["args"][SERVER["args"].index("--port") + 1]


def test_flags_and_paths_are_those_of_the_server_and_its_mounts() -> None:
    """A folder that the server writes to is not read-only."""
    command, *arguments = SERVER["args"]
    assert command == "serve"
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    known = {f"--{name.replace('_', '-')}" for name in ServeSettings.model_fields}
    assert set(flags) <= known
    config = PurePosixPath(flags["--config"])
    assert mount_of(str(config))["name"] == "settings"
    assert config.name in OBJECTS["ConfigMap"]["data"]
    keys = PurePosixPath(yaml.safe_load(OBJECTS["ConfigMap"]["data"][config.name])["api_key_file"])
    assert mount_of(str(keys))["name"] == "keys"
    assert keys.name in OBJECTS["Secret"]["stringData"]
    of_image = " ".join(instructions("ENV"))
    for each in SERVER["env"]:
        assert f"{each['name']}=" in of_image, "a variable that the image sets, too"
        assert not mount_of(each["value"]).get("readOnly", False)
    user, group = (int(each) for each in instructions("USER")[-1].split(":"))
    security = POD["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (user, group)


def test_what_sets_a_folder_for_one_kind_of_kernels_sets_both() -> None:
    """In all files of docker/; else the kernels of a GPU are written below a read-only home."""
    setting = r"\b{}_CACHE_DIR(?:=|, value: )(\S+)/{}\b"
    files = [path for path in MANIFEST.parent.rglob("*") if path.is_file()]
    numba, triton = (
        {
            path.name: re.findall(setting.format(name.upper(), name), path.read_text())
            for path in files
        }
        for name in ("numba", "triton")
    )
    assert numba == triton
    assert {name for name, found in numba.items() if found} == {MANIFEST.name, UNIT.name}
    assert mount_of(f"{numba[MANIFEST.name][0]}/triton")["name"] == "cache"
    assert VOLUMES["cache"] == {"name": "cache", "emptyDir": {}}
    assert numba[UNIT.name] == [f"%C/{unit()['Service']['CacheDirectory']}"]


def test_the_grace_period_covers_the_drain(tmp_path: Path) -> None:
    """The same holds for the unit."""
    settings = load_settings({"config": str(unpacked(tmp_path, "k"))})
    needed = settings.shutdown_timeout_seconds + _FAREWELL_S
    assert POD["terminationGracePeriodSeconds"] > needed
    assert int(unit()["Service"]["TimeoutStopSec"]) > needed
    assert OBJECTS["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}


def test_the_shipped_secret_starts_no_server(tmp_path: Path) -> None:
    """A key that everybody knows would be worse than none."""
    with pytest.raises(SettingsError, match="line 1: there must be a key after the colon"):
        key_table_of(load_settings({"config": str(unpacked(tmp_path, ""))}))


def test_probes_are_answered_with_the_settings_of_the_manifest(tmp_path: Path) -> None:
    """A server runs with the ConfigMap and a key; probes present none."""
    with running_server("--config", str(unpacked(tmp_path, "secret"))) as running:
        for name in PROBES:
            path = SERVER[name]["httpGet"]["path"]
            assert httpx.get(running.url + path).status_code == 200
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 401
        bearer = {"Authorization": "Bearer secret"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=bearer, timeout=30)
        assert answer.status_code == 200
    assert SERVER["livenessProbe"]["httpGet"]["path"] == "/live"
    assert SERVER["startupProbe"]["httpGet"]["path"] == "/ready"
    startup = SERVER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 15 * 60, "as in the image"


def test_monitor_and_autoscaler_fit_the_server() -> None:
    """A cluster's schema has the autoscaler; the monitor is an object of the operator."""
    monitor, scaler = objects_of("kubernetes.monitoring.yaml")
    service = OBJECTS["Service"]
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint) == {"port", "path", "interval"}
    assert (endpoint["port"], endpoint["path"]) == (service["spec"]["ports"][0]["name"], "/metrics")
    target = {"apiVersion": "apps/v1", "kind": "Deployment"}
    target["name"] = OBJECTS["Deployment"]["metadata"]["name"]
    assert scaler["spec"]["scaleTargetRef"] == target
    page = (ROOT / "docs/reference/metrics.md").read_text()
    for each in scaler["spec"]["metrics"]:
        assert f"| `{each['pods']['metric']['name']}` | gauge |" in page
    check_objects(scaler)


def unit() -> configparser.ConfigParser:
    """The unit's sections."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_the_unit_fits_the_server() -> None:
    """Its command, signals and exit code are the server's."""
    service = unit()["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/ropewalk")
    assert arguments[:2] == ["serve", "--config"]
    assert "-HUP $MAINPID" in service["ExecReload"]
    assert service["RestartPreventExitStatus"] == str(USAGE_ERROR)
    assert "KillSignal" not in service, "SIGTERM is systemd's own choice"
    page = (ROOT / "docs/reference/settings.md").read_text()
    for variable in re.findall(r"(\w+)=", service["Environment"]):
        assert f"`{variable}`" in page


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """The program is replaced by one that exists here."""
    if shutil.which("systemd-analyze") is None:
        missing("systemd-analyze (Debian's package systemd)")
    text = UNIT.read_text(encoding="utf-8")
    file = tmp_path / UNIT.name
    file.write_text(text.replace("/opt/ropewalk/.venv/bin/ropewalk", sys.executable))
    command = ["systemd-analyze", "verify", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not [line for line in ended.stderr.splitlines() if UNIT.name in line]
