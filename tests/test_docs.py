"""The documentation names everything there is. (Its commands: test_doc_commands.py.)"""

import re
from pathlib import Path

import pytest

from server.app import create_app
from server.chat_schema import ChatRequest, Message, TokenLogprobs
from server.completion_schema import CompletionRequest
from server.load_service import load_service
from server.model_schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from server.schema import PromptProgressAnswer, RopeAnswer, RopeField
from server.service import Service
from server.setting_sections import SECTIONS
from server.setting_types import Section
from server.settings import load_settings
from tests.settings_page import table

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("rope", "model_runtime", "server", "server/bench", "server/evaluation", "training"),
    "benchmarks",
)


def page(name: str) -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / name).read_text()


@pytest.fixture(scope="module")
def service() -> Service:
    """A service over the embedded model, not started."""
    return load_service(load_settings({}))[0]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_is_documented_with_its_unit_default_and_help(section: type[Section]) -> None:
    """flag, variable and text are the code's: `python -m tests.settings_page` prints them"""
    assert table(section) in page("settings.md")


def test_every_metric_is_documented(service: Service) -> None:
    """by its full name"""
    rendered = service.metrics.render().decode()
    names = re.findall(r"# TYPE (\w+)", rendered)
    assert "ropewalk_http_requests_total" in names
    for name in names:
        assert f"`{name}`" in page("metrics.md")


def test_every_route_is_documented(service: Service) -> None:
    """with its method"""
    paths = create_app(service).openapi()["paths"]
    assert "/v1/chat/completions" in paths
    for path, methods in paths.items():
        for method in methods:
            if method != "head":
                assert re.search(rf"{method.upper()} [^\n]*{re.escape(path)}", page("api.md")), path


def test_there_are_these_routes_and_no_other(service: Service) -> None:
    """whoever adds one decides, with this list, who may ask it"""
    found = {
        (method.upper(), path)
        for path, methods in create_app(service).openapi()["paths"].items()
        for method in methods
        if method != "head"
    }
    assert found == {
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        *(("GET", path) for path in ("/live", "/ready", "/health", "/version", "/metrics")),
    }


def test_every_field_and_error_code_is_documented() -> None:
    """of requests and answers"""
    bodies = (
        *(CompletionRequest, ChatRequest, Message, RopeField, RopeAnswer, TokenLogprobs),
        *(PromptProgressAnswer, TokenizeRequest, TokenizeResponse, DetokenizeRequest),
        *(DetokenizeResponse, TokenizerInfo),
    )
    for model in bodies:
        for name in model.model_fields:
            assert re.search(rf"[`\"]{name}[`\"]", page("api.md")), f"{model.__name__}.{name}"
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
        section = text.split(f"### {package}/\n")[1].split("\n### ")[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        named = set(re.findall(r"`(\w+\.py)`", " ".join(cells)))
        there = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
        assert named == there


def test_links_lead_somewhere() -> None:
    """inside the project"""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
