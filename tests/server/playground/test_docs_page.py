"""The page at /docs: complete, without a network, under a strict policy."""

import html
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from ropewalk.server.middleware.auth import OPEN_PATHS
from ropewalk.server.playground.docs_page import address_of, render
from ropewalk.server.playground.schema_words import field_rows
from tests.servers.processes import Server, running_server

POLICY = r"default-src 'none'; style-src 'sha256-[\w+/=]{44}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # noqa: E501  # one header


class Tags(HTMLParser):
    """The tags of a page with their attributes, and ids."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every tag of a kind."""
        return [attributes for name, attributes in self.found if name == tag]

    def values(self, attribute: str) -> list[str]:
        """Every value of an attribute."""
        return [str(each[attribute]) for _, each in self.found if attribute in each]


@pytest.fixture(scope="module")
def page(server: Server) -> str:
    """The page of the embedded model's server."""
    return httpx.get(f"{server.url}/docs", timeout=30).text


def curls(page: str) -> list[str]:
    """The example of each operation."""
    found = re.findall(r"<pre[^>]*><code>(.*?)</code>", page, re.DOTALL)
    return [html.unescape(each) for each in found]


def test_the_headers_allow_nothing_but_the_style_of_the_page(server: Server, page: str) -> None:
    """The hash of the policy is that of the page's only style; there is no script."""
    answer = httpx.get(f"{server.url}/docs", timeout=30)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert re.fullmatch(POLICY, answer.headers["content-security-policy"])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    tags = Tags(page)
    assert len(tags.of("style")) == 1
    assert not [name for name, _ in tags.found if name in {"script", "img", "iframe", "link"}]
    assert not [name for _, each in tags.found for name in each if name.startswith("on")]


def test_no_foreign_address_is_in_the_page(server: Server, page: str) -> None:
    """The only address is the server's own, as the reader asked for it."""
    urls = re.findall(r"https?://[^\s<\"]+", page)
    assert {"/".join(html.unescape(url).split("/")[:3]).rstrip("&quot;") for url in urls} == {
        server.url
    }
    assert not re.findall(r"[\"'(]//", page)
    references = [*Tags(page).values("href"), *Tags(page).values("src")]
    assert [each for each in references if not each.startswith("#")] == ["openapi.json"]


def test_every_operation_and_schema_is_on_the_page(server: Server, page: str) -> None:
    """Each link of the page leads to an id, which is there once."""
    document = httpx.get(f"{server.url}/openapi.json", timeout=30).json()
    text = html.unescape(page)
    operations = [(m, p) for p, methods in document["paths"].items() for m in methods]
    assert len(operations) > 10
    for method, path in operations:
        assert f"<code>{method.upper()} {path}</code></h2>" in text
    for name, schema in document["components"]["schemas"].items():
        assert f'id="schema-{name}"' in page
        for row in field_rows(schema):
            assert f"<code>{row.name}</code>" in page
    ids = Tags(page).values("id")
    assert len(ids) == len(set(ids))
    targets = {each[1:] for each in Tags(page).values("href") if each.startswith("#")}
    assert targets <= set(ids)
    assert len(curls(page)) == len(operations)


def test_the_page_can_be_read_without_sight_or_mouse(page: str) -> None:
    """It has a language, one first heading, captions and named rows, and boxes that can scroll."""
    tags = Tags(page)
    assert tags.of("html") == [{"lang": "en"}]
    assert len(tags.of("h1")) == 1
    assert len(tags.of("table")) == len(tags.of("caption"))
    assert {each["scope"] for each in tags.of("th")} == {"col", "row"}
    assert all(each.get("tabindex") == "0" for kind in ("pre", "table") for each in tags.of(kind))
    labels = {each["aria-labelledby"] for each in tags.of("section")}
    assert labels <= set(tags.values("id"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_example_is_answered(tmp_path: Path) -> None:
    """A shell runs each example as the page has it, against a server that asks for a key."""
    with running_server("--api-key", "first") as guarded:
        bearer = {"Authorization": "Bearer first"}
        assert httpx.get(f"{guarded.url}/docs").status_code == 401
        page = httpx.get(f"{guarded.url}/docs", headers=bearer, timeout=30).text
        examples = curls(page)
        assert sum("$ROPEWALK_API_KEY" in each for each in examples) == len(examples) - 4, (
            "probes, /version"
        )
        document = httpx.get(f"{guarded.url}/openapi.json", headers=bearer, timeout=30).json()
        asked = {
            path
            for path, each in document["paths"].items()
            if any("401" in one["responses"] for one in each.values())
        }
        assert asked == set(document["paths"]) - OPEN_PATHS
        for each in examples:
            told = "--silent --show-error --output /dev/null --write-out '%{http_code}'"
            ended = subprocess.run(
                ["/bin/sh", "-c", f"{each} {told}"],
                env={"ROPEWALK_API_KEY": "first", "PATH": "/usr/bin:/bin"},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (ended.stdout, ended.stderr) == ("200", ""), each


def test_a_route_lists_the_errors_that_it_can_answer(server: Server) -> None:
    """Only a route with a body reads one, and only answers wait in a queue."""
    paths = httpx.get(f"{server.url}/openapi.json", timeout=30).json()["paths"]
    every = {"200", "400", "403", "500", "503"}
    for probe in ("/live", "/ready", "/health", "/version", "/metrics", "/v1/models"):
        assert set(paths[probe]["get"]["responses"]) == every, probe
    assert set(paths["/v1/models/{name}"]["get"]["responses"]) == {*every, "404"}
    with_body = {*every, "404", "408", "413", "415"}
    assert set(paths["/tokenize"]["post"]["responses"]) == with_body
    for route in ("/v1/completions", "/v1/chat/completions"):
        responses = paths[route]["post"]["responses"]
        assert set(responses) == {*with_body, "429"}
        assert "a bound of the API key" in responses["429"]["description"]


def test_names_cannot_leave_their_place() -> None:
    """A served name and a description with markup stay text."""
    hostile = "<b>\"$(x)'&"
    name = {"name": "name", "in": "path", "schema": {}, "required": True}
    parameters = [name, *[{**name, "name": hostile, "required": False}] * 2]
    operation = {"description": hostile, "parameters": parameters, "responses": {}}
    document = {
        "info": {"title": "a", "version": "1"},
        "paths": {"/v1/models/{name}": {"get": operation}},
        "components": {"schemas": {}},
    }
    page = render(document, hostile, None)
    assert "<b>" not in page
    assert page.count(">yes<") == 1, "one parameter is required"
    curl = curls(page)[0]
    assert shlex.split(curl) == [
        "curl",
        "http://127.0.0.1:8000/v1/models/%3Cb%3E%22%24%28x%29%27%26",
    ]
    assert "$(" not in curl


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("models.example:8443", "https://models.example:8443/rope"),
        ('x"; touch /tmp/x; "', "http://127.0.0.1:8000/rope"),
        ("", "http://127.0.0.1:8000/rope"),
    ],
)
def test_the_address_of_the_examples_is_a_host_or_the_default(host: str, address: str) -> None:
    """A client's header cannot put a command or markup into the page."""
    assert address_of("https", host, "/rope/") == address


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_it_under_its_policy(server: Server, tmp_path: Path) -> None:
    """Chromium applies the style and reports no violation of the policy."""
    shown = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *("--virtual-time-budget=2000", f"--user-data-dir={tmp_path}", "--dump-dom"),
            f"{server.url}/docs",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "<h1>ropewalk" in shown.stdout
    assert "Content Security Policy" not in shown.stderr
