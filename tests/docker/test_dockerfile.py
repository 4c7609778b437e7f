"""The image's steps replayed: built from the wheel, run as its user, called, and stopped."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from ropewalk.server.settings.load import ServeSettings
from tests.docker.dockerfile import Ignored, expand, parse
from tests.docker.image_steps import Image, build

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = parse((ROOT / "Dockerfile").read_text())
_START_S, _STOP_S = 180, 40
_COMMIT = "0123456789ab"
# The steps install torch into a fresh environment: under a minute from a local index.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """The last stage, built; its folder is readable for the image's user, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="ropewalk-image-") as folder:
        Path(folder).chmod(0o755)
        index = os.environ.get("TORCH_INDEX", "")
        if not index and torch.version.cuda is None and sys.platform == "linux":
            # This machine's torch is of another index, which pip's own configuration names.
            empty = Path(folder, "index")
            empty.mkdir()
            index = empty.as_uri()
        build_args = {"TORCH_INDEX": index, "SOURCE_COMMIT": _COMMIT}
        yield build(DOCKERFILE, ROOT, Path(folder), build_args)


@contextmanager
def started(image: Image) -> Iterator[tuple[subprocess.Popen[str], str, dict[str, str]]]:
    """ENTRYPOINT and CMD, on a free port, from the first moment that HEALTHCHECK is content."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"ROPEWALK_PORT": port}  # as `docker run --env` sets it
    assert image.run(image.healthcheck, **variables)[0] == 1, "healthy before it was started"
    process = image.start([*image.entrypoint, *image.cmd], **variables)
    try:
        deadline = time.monotonic() + _START_S
        while image.run(image.healthcheck, **variables)[0] != 0:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "never healthy"
            time.sleep(0.5)
        yield process, f"http://127.0.0.1:{port}", variables
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.long
def test_the_image_serves_and_stops(image: Image) -> None:
    """The image's own health check passes, and the stop signal ends the process cleanly."""
    with started(image) as (process, url, variables):
        body = {"prompt": "import os\n", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        status = Path(f"/proc/{process.pid}/status").read_text()
        uids = set(status.split("Uid:")[1].split("\n")[0].split())
        assert uids == {image.user.split(":")[0] if os.geteuid() == 0 else str(os.geteuid())}
        process.send_signal(signal.Signals[image.declared["STOPSIGNAL"]])
        output, _ = process.communicate(timeout=_STOP_S)
        # uvicorn shuts down, then hands the signal on, so that the parent sees why it ended.
        assert process.returncode in {0, -signal.SIGTERM}, output
        assert "listening on" in output
        assert "Traceback" not in output
        assert image.run(image.healthcheck, **variables)[0] == 1, "healthy after its end"
    compiled = list(Path(image.env["NUMBA_CACHE_DIR"]).rglob("*.nbc"))
    assert compiled, "the compiled kernel was not kept"


@pytest.mark.long
def test_it_is_the_wheel_that_runs(image: Image) -> None:
    """The packages are in the environment's site-packages, with the demonstration model."""
    code = "from ropewalk import rope, server; print(server.__file__); print(rope.__file__)"
    status, output = image.run(["python", "-c", code])
    assert status == 0, output
    for line in output.split():
        assert Path(line).is_relative_to(image.path("/opt/ropewalk/lib"))
        assert "site-packages" in line
    (wheel,) = (image.stages["wheel"] / "dist").glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    for package in ("rope", "model_runtime", "server", "studies"):
        files = [*(ROOT / package).rglob("*.py"), *(ROOT / package).glob("embedded_model/*")]
        assert files
        assert {f"ropewalk/{path.relative_to(ROOT)}" for path in files} <= packed
    assert not any(name.startswith("tests/") for name in packed)


@pytest.mark.long
def test_the_image_knows_its_commit(image: Image) -> None:
    """The builder is given the commit, because it has no clone."""
    status, output = image.run([*image.entrypoint, "--version"])
    assert status == 0, output
    assert output.endswith(f" (commit {_COMMIT})\n")


@pytest.mark.long
def test_the_user_writes_to_its_home_and_the_models_only(image: Image) -> None:
    """The check runs as that user, and the environment belongs to root."""
    if os.geteuid() != 0:
        pytest.skip("only root can become the image's user")
    code = "import os, sys; print(*(os.access(path, os.W_OK) for path in sys.argv[1:]))"
    site_packages = next(image.path("/opt/ropewalk/lib").glob("python*/site-packages"))
    writable = [image.env["HOME"], image.env["NUMBA_CACHE_DIR"], str(image.path("/models"))]
    paths = [*writable, str(site_packages), str(site_packages / "ropewalk/model_runtime")]
    assert image.run(["python", "-c", code, *paths])[1] == "True True True False False\n"


@pytest.mark.long
def test_only_steps_that_change_the_system_are_left_out(image: Image) -> None:
    """The test states the list of left-out steps, so no step is skipped silently."""
    commands = [text.split()[0] for text in image.not_replayed]
    assert commands == ["groupadd"] + ([] if os.geteuid() == 0 else ["chown"])


@pytest.mark.long
def test_flags_can_be_appended(image: Image) -> None:
    """The command is that of `docker run ropewalk serve --port ...`."""
    status, output = image.run([*image.entrypoint, "serve", "--port", "no number"])
    assert status == 2
    assert "port:" in output


def test_it_runs_as_a_numeric_user_other_than_root() -> None:
    """An orchestrator can verify a numeric user."""
    (user,) = (each.text for each in DOCKERFILE.all("USER"))
    assert user == "10001:10001"
    last = [each.name for each in DOCKERFILE.stages[-1].instructions]
    assert "RUN" not in last[last.index("USER") :]


def test_variables_are_settings_and_the_port_is_exposed() -> None:
    """A variable that is no setting would stop the server."""
    given = dict(word.split("=", 1) for each in DOCKERFILE.all("ENV") for word in each.words())
    settings = {f"ROPEWALK_{name.upper()}" for name in ServeSettings.model_fields}
    assert {name for name in given if name.startswith("ROPEWALK_")} <= settings
    assert [each.text for each in DOCKERFILE.all("EXPOSE")] == [given["ROPEWALK_PORT"]]
    assert given["ROPEWALK_HOST"] == "0.0.0.0"  # noqa: S104  # inside a container


def test_copied_files_exist_and_reach_the_builder() -> None:
    """Files that no step copies stay out of the build context."""
    ignored = Ignored((ROOT / ".dockerignore").read_text())
    sources = [
        ROOT / word
        for each in DOCKERFILE.all("COPY")
        if "from" not in each.flags
        for word in each.words()[:-1]
    ]
    for source in sources:
        assert ignored.kept(ROOT, [source]), source
    for path in ROOT.iterdir():
        copied = any(source.is_relative_to(path) for source in sources)
        assert ignored(Path(path.name)) != copied, path.name
    assert ignored(Path(".git/config"))
    assert ignored(Path("rope/__pycache__/yarn.pyc"))
    assert ignored(Path(".venv/bin/python"))


def test_stages_and_bases_are_connected() -> None:
    """COPY --from names an earlier stage; every base is the one argument, without a host."""
    names: list[str] = []
    for stage in DOCKERFILE.stages:
        assert stage.base == DOCKERFILE.args["BASE_IMAGE"]
        for each in stage.instructions:
            if each.name == "COPY" and "from" in each.flags:
                assert each.flags["from"] in names
        names.append(stage.name)
    assert "." not in DOCKERFILE.args["BASE_IMAGE"].split("/")[0].split(":")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A/b", "1/b"),
        ("${A}2", "12"),
        ("${B:-x}", "x"),
        ("${A:-x}", "1"),
        ("${A:+y}", "y"),
        ("${B:+y}", ""),
    ],
)
def test_variables_are_expanded_as_the_builder_does(text: str, expected: str) -> None:
    """The cases are the four forms of a variable."""
    assert expand(text, {"A": "1"}) == expected


def test_instructions_are_read_over_several_lines() -> None:
    """Comments may lie between the lines, and flags come before the text."""
    found = parse(
        "ARG X=1\nFROM a:${X} AS one\nRUN a \\\n  # no\n  && b\nFROM c\nCOPY --from=one /x /y\n"
    )
    assert [(stage.base, stage.name) for stage in found.stages] == [("a:1", "one"), ("c", "final")]
    assert found.stages[0].instructions[0].text.split() == ["a", "&&", "b"]
    copy = found.stages[1].instructions[0]
    assert (copy.flags, copy.words()) == ({"from": "one"}, ["/x", "/y"])
    with pytest.raises(AssertionError, match="ONBUILD"):
        parse("FROM a\nONBUILD RUN x")
