"""The documentation names every setting, metric, route, field and folder.

Its commands are run in test_doc_commands.py.
"""

import re
from pathlib import Path

import pytest

from ropewalk.server.api.parts.logprobs import TokenLogprobs
from ropewalk.server.api.service import Service
from ropewalk.server.settings.fields import Section
from ropewalk.server.settings.load import SECTIONS, load_settings
from ropewalk.server.settings.route_settings import ROUTE_SECTIONS
from ropewalk.server.startup.app import create_app
from ropewalk.server.startup.load_service import load_service
from ropewalk.server.turns.message_schema import CountTokensRequest, MessagesRequest
from ropewalk.server.turns.models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from tests.api_page import written
from tests.settings_page import table

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rope", "model_runtime", "server", "studies")


def page(name: str) -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / name).read_text()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """A service over the embedded model with all metrics, not started."""
    folder = tmp_path_factory.mktemp("disk") / "kv"
    return load_service(load_settings({"kv_disk": str(folder), "kv_disk_gib": "1"}))[0]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_is_documented_with_its_unit_default_and_help(section: type[Section]) -> None:
    """The tables are generated: `python -m tests.settings_page` prints them."""
    assert table(section) in page("reference/settings.md")


@pytest.mark.parametrize("section", ROUTE_SECTIONS, ids=lambda section: section.__name__)
def test_every_setting_of_the_router_is_documented(section: type[Section]) -> None:
    """The tables are printed by the same command."""
    assert table(section) in page("reference/router-settings.md")


def test_every_metric_is_documented(service: Service) -> None:
    """The page of metrics has every full name."""
    rendered = service.metrics.render().decode()
    names = re.findall(r"# TYPE (\w+)", rendered)
    assert "ropewalk_http_requests_total" in names
    for name in names:
        assert f"`{name}`" in page("reference/metrics.md")


def test_every_route_is_documented(service: Service) -> None:
    """The page of routes has each path with its method."""
    paths = create_app(service).openapi()["paths"]
    assert "/v1/chat/completions" in paths
    for path, methods in paths.items():
        for method in methods:
            if method != "head":
                assert re.search(
                    rf"{method.upper()} [^\n]*{re.escape(path)}", page("reference/api.md")
                ), path


def test_there_are_these_routes_and_no_other(service: Service) -> None:
    """A new route must be added to this test, with a decision about its access."""
    found = {
        (method.upper(), path)
        for path, methods in create_app(service).openapi()["paths"].items()
        for method in methods
        if method != "head"
    }
    assert found == {
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("GET", "/stats"),
        *(("GET", path) for path in ("/live", "/ready", "/health", "/version", "/metrics")),
    }


def test_the_tables_of_fields_are_those_of_the_schemas() -> None:
    """`python -m tests.api_page` writes them."""
    assert written(page("reference/api.md")) == page("reference/api.md")


def test_every_field_and_error_code_is_documented() -> None:
    """Also the fields that no table of the page has."""
    bodies = (
        *(TokenLogprobs, TokenizeRequest, TokenizeResponse, DetokenizeRequest),
        *(DetokenizeResponse, TokenizerInfo, CountTokensRequest, MessagesRequest),
    )
    for model in bodies:
        for field, facts in model.model_fields.items():
            name = facts.alias or field
            assert re.search(rf"[`\"]{name}[`\"]", page("reference/api.md")), (
                f"{model.__name__}.{name}"
            )
    sources = "".join(
        path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    )
    codes = set(re.findall(r'code="(\w+)"', sources))
    codes |= set(re.findall(r'_error", "(\w+)", (?:None|\d)', sources))
    assert {"context_length_exceeded", "queue_full", "model_not_found"} <= codes
    for code in codes:
        assert f"`{code}`" in page("reference/errors.md"), code


def test_every_folder_has_its_row_in_the_architecture() -> None:
    """The table has no row of a folder that is gone."""
    named = re.findall(r"^\| (`[^|]*`) \|", page("design/architecture.md"), re.MULTILINE)
    rows = {row for each in named for row in re.findall(r"`([\w/]+)/`", each)}
    there = {
        str(path.parent.relative_to(ROOT / "ropewalk"))
        for package in ("model_runtime", "server")
        for path in (ROOT / "ropewalk" / package).glob("*/__init__.py")
    }
    assert there <= rows
    assert all((ROOT / "ropewalk" / row).is_dir() or (ROOT / row).is_dir() for row in rows)


def test_files_that_pages_name_exist() -> None:
    """The pages are the map of the code and those beside it; names may be paths."""
    names = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    for name in sorted(each.name for each in (ROOT / "docs/design").glob("*.md")):
        for path in re.findall(r"`([\w/]+\.py)`", page(f"design/{name}")):
            assert path.rpartition("/")[2] in names, f"{name}: {path}"
            assert "/" not in path or any(
                (ROOT / root / path).is_file()
                for root in (".", *("ropewalk/" + each for each in ("", "model_runtime", "server")))
            ), f"{name}: {path}"


def anchors(path: Path) -> set[str]:
    """The places of a page that a link may name, as GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    return made | set(re.findall(r'<a id="([^"]+)"', text))


def test_links_lead_somewhere() -> None:
    """Links that lead out of the project are not followed."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    dead = []
    for path in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text()):
            if "://" in target:
                continue
            other = path.parent / target if target else path
            if not other.exists() or (anchor and anchor not in anchors(other)):
                dead.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert not dead, "\n".join(dead)


def test_pages_that_the_code_names_exist() -> None:
    """Messages, descriptions of fields and comments name a page as a path from the root."""
    places = [*(ROOT / "ropewalk").rglob("*.py"), *(ROOT / "docker").glob("*"), ROOT / "Makefile"]
    named = re.compile(r"\b((?:docs|benchmarks)/[\w/-]+\.md)(?:#([\w-]+))?")
    dead = []
    for path in (each for each in places if each.is_file()):
        text = path.read_text()
        for name, anchor in named.findall(text):
            if "/formats/gguf/" in str(path) and name == "docs/gguf.md":
                continue  # a page of ggml's project
            other = ROOT / name
            if not other.exists() or (anchor and anchor not in anchors(other)):
                dead.append(f"{path.relative_to(ROOT)}: {name}#{anchor}")
    assert not dead, "\n".join(dead)
