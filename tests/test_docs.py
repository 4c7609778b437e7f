"""The documentation names everything there is, and its commands run as pasted."""

import re
import subprocess
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from model_runtime.checkpoint import Checkpoint
from server.app import create_app
from server.load_service import load_service
from server.service import Service
from server.settings import ServeSettings, load_settings
from tests.processes import Server

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rope", "model_runtime", "server")


def page(name: str) -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / name).read_text()


@pytest.fixture(scope="module")
def service() -> Service:
    """A service over the embedded model, not started."""
    return load_service(load_settings({}))[0]


@pytest.mark.parametrize("name", list(ServeSettings.model_fields))
def test_every_setting_is_documented_with_its_help(name: str) -> None:
    """flag, variable, default and text are the code's"""
    field = ServeSettings.model_fields[name]
    default = "" if field.default is None else f"`{field.default}`"
    flag = "`MODEL`" if name == "model" else f"`--{name.replace('_', '-')}`"
    row = f"| {flag} | `ROPEWALK_{name.upper()}` | {default} | {field.description} |"
    assert row in page("settings.md"), f"docs/settings.md lacks this row:\n{row}"


def test_every_metric_is_documented(service: Service) -> None:
    """by its full name"""
    rendered = service.metrics.render().decode()
    for name in re.findall(r"# TYPE (\w+)", rendered):
        assert f"`{name}`" in page("metrics.md")


def test_every_route_is_documented(service: Service) -> None:
    """with its method"""
    for route in create_app(service).routes:
        if isinstance(route, APIRoute):
            assert route.path in page("api.md")


def test_every_field_and_error_code_is_documented() -> None:
    """of requests and answers"""
    from server.schema import CompletionRequest, RopeAnswer, RopeField

    for model in (CompletionRequest, RopeField, RopeAnswer):
        for name in model.model_fields:
            assert f"`{name}`" in page("api.md"), name
    sources = "".join(path.read_text() for path in ROOT.glob("*/*.py"))
    codes = set(re.findall(r'code="(\w+)"', sources))
    codes |= set(re.findall(r'_error", "(\w+)", (?:None|\d)', sources))
    assert {"context_length_exceeded", "queue_full", "model_not_found"} <= codes
    for code in codes:
        assert f"`{code}`" in page("api.md"), code


def test_every_file_has_its_line_in_the_architecture() -> None:
    """and no line is left of a file that is gone"""
    text = page("architecture.md")
    for package in PACKAGES:
        section = text.split(f"### {package}/")[1].split("\n### ")[0]
        named = set(re.findall(r"`(\w+\.py)`", section.split("\n`tests/`")[0]))
        there = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
        assert named == there


def test_links_lead_somewhere() -> None:
    """inside the project"""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readmes_commands_run_as_pasted(
    server: Server, embedded: Checkpoint, tmp_path: Path
) -> None:
    """against a server on another port; the needle is found by default only"""
    assert embedded.native.native_len == 256
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = [block for block in blocks if "curl" in block]
    assert len(commands) == 4
    outputs = []
    for block in commands:
        script = block.replace("http://127.0.0.1:8000", server.url)
        ended = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
        )
        assert ended.returncode == 0, ended.stderr
        outputs.append(ended.stdout)
    assert '"finish_reason":"length"' in outputs[0]
    assert '"text":"93175"' in outputs[1]
    assert '"rope_type":"yarn","factor":8.0' in outputs[1]
    assert "93175" not in outputs[2]
    assert '"rope_type":"default"' in outputs[2]
    assert 'ropewalk_time_to_first_token_seconds_count{context_bucket="2048"}' in outputs[3]
