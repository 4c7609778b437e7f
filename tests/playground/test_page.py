"""The page in a real browser: what it sends, shows and keeps."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from ropewalk.server.playground.page_files import HEADERS, page_files
from tests.playground.conftest import Watched, watched
from tests.servers.processes import Server

PAGE = Path(__file__).parents[2] / "docs/guide/playground.md"
PROMPT = "def add(a, b):\n    return"


def test_a_prompt_is_completed(opened: Watched, server: Server) -> None:
    """The page shows the text that the route answers, with its tokens and its tier."""
    opened.page.fill("#prompt", PROMPT)
    opened.page.fill("#max-tokens", "8")
    opened.send()
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert opened.page.locator("#answer-a .output").text_content() == answer["choices"][0]["text"]
    facts = opened.page.locator("#answer-a .facts").text_content() or ""
    assert f"{answer['usage']['prompt_tokens']} + 8 tokens" in facts
    assert f"{answer['choices'][0]['rope']['factor']:g}x" in facts


def test_one_click_compares_scaling_with_none(opened: Watched) -> None:
    """A value is found under the deployment's yarn and lost without, as the guide says."""
    told = re.findall(r"!\[(.*)\]\(\.\./images/playground-compare.png\)", PAGE.read_text())[0]
    for _ in range(3):  # a small model may miss a value
        opened.page.fill("#needle-len", "2032")
        opened.page.click("#needle")
        expect(opened.page.locator("#status")).to_contain_text("is hidden")
        opened.send()
        bar = opened.page.locator("#context-text").text_content() or ""
        assert f"The bar says {bar.rpartition(' tokens, ')[2]}." in told
        for pane, table in (("a", "yarn 8x"), ("b", "default 1x")):
            facts = opened.page.locator(f"#answer-{pane} .facts").text_content() or ""
            assert facts.startswith(table)
            assert f"Answer {pane.upper()}, {table}:" in told
        assert "lost" in (opened.page.locator("#answer-b .verdict").text_content() or "")
        if "found" in (opened.page.locator("#answer-a .verdict").text_content() or ""):
            return
    pytest.fail("no value was found")


def test_stop_ends_the_request(opened: Watched, server: Server) -> None:
    """The engine runs nothing any more."""
    opened.page.fill("#prompt", PROMPT)
    opened.page.fill("#max-tokens", "1500")
    opened.page.fill("#temperature", "1")  # drafts would make the text of 0 in a fifth of a second
    opened.page.click("#send")
    expect(opened.page.locator("#answer-a .output")).not_to_be_empty(timeout=60_000)
    opened.page.keyboard.press("Escape")
    expect(opened.page.locator("#status")).to_have_text("stopped")
    deadline = time.monotonic() + 10  # the engine ends it after its step
    while httpx.get(f"{server.url}/stats").json()["requests_running"]:
        assert time.monotonic() < deadline
        opened.page.wait_for_timeout(50)
    expect(opened.page.locator("#load")).to_contain_text("running 0", timeout=10_000)


def test_an_alternative_is_chosen_by_keyboard(opened: Watched) -> None:
    """Enter on a token opens its alternatives; choosing one continues from there."""
    opened.page.fill("#prompt", PROMPT)
    opened.page.fill("#max-tokens", "4")
    opened.page.check("#logprobs")
    opened.send()
    opened.page.locator(".token").first.focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("Enter")
    buttons = opened.page.locator("#alternatives li button")
    expect(buttons).to_have_count(5)
    chosen = json.loads((buttons.nth(1).text_content() or "").rpartition(" ")[0].rpartition(" ")[0])
    buttons.nth(1).focus()
    opened.page.keyboard.press("Enter")
    expect(opened.page.locator("#status")).to_contain_text("done", timeout=60_000)
    prompt = opened.page.locator("#prompt").input_value()
    assert prompt.startswith(PROMPT)
    assert prompt.endswith(chosen)


def _code(page: Page, kind: str) -> str:
    page.check(f"#code-{kind}")
    return page.locator("#code").text_content() or ""


def test_the_code_gives_the_same_text(opened: Watched, tmp_path: Path) -> None:
    """The curl and Python snippets are run as they stand."""
    opened.page.fill("#prompt", 'it\'s a "test" of $HOME and \\n żółw\n')
    opened.page.fill("#max-tokens", "12")
    opened.page.fill("#rope-factor", "2")
    opened.send()
    shown = opened.page.locator("#answer-a .output").text_content()
    curl = subprocess.run(
        ["/bin/sh", "-c", _code(opened.page, "curl")], capture_output=True, timeout=60, check=True
    )
    answer = json.loads(curl.stdout)
    assert answer["choices"][0]["text"] == shown
    assert answer["choices"][0]["rope"]["factor"] == 2
    script = tmp_path / "snippet.py"
    script.write_text(_code(opened.page, "python"), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == f"{shown}\n"
    assert json.loads(_code(opened.page, "json"))["rope"] == {"factor": 2}


def test_a_chat_has_turns(opened: Watched) -> None:
    """The second request contains the first question and its answer."""
    opened.page.check("#mode-chat")
    opened.page.fill("#max-tokens", "6")
    for text in ("hello", "again"):
        opened.page.fill("#prompt", text)
        opened.send()
    turns = opened.page.locator("#transcript li").all_text_contents()
    assert [turn.partition(":")[0] for turn in turns] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(("field", "label"), [("temperature", "Temperature"), ("seed", "Seed")])
def test_a_mistyped_number_is_told_and_not_sent(opened: Watched, field: str, label: str) -> None:
    """The alert names the field; nothing is sent until it is a number."""
    opened.page.fill("#prompt", PROMPT)
    opened.page.fill(f"#{field}", "hot")
    expect(opened.page.locator("#alert")).to_have_text(f"{label} must be a number. Given: hot")
    opened.page.click("#send")
    assert not any(url.endswith("/v1/completions") for url in opened.urls)
    assert opened.page.locator(f"#{field}").get_attribute("aria-invalid") == "true"
    opened.page.fill(f"#{field}", "0")
    opened.page.fill("#max-tokens", "2")
    opened.send()


def test_a_key_is_asked_for_and_never_kept(browser: Browser, locked: Server) -> None:
    """After a 401 the typed key works. No storage, cookie or address holds it."""
    context = browser.new_context()
    found = watched(context.new_page())
    page = found.page
    page.goto(f"{locked.url}/playground/")
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#server-state")).to_have_text("needs a key")
    expect(page.locator("#send")).to_be_disabled()
    page.fill("#key", "sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#server-state")).to_have_text("ready")
    expect(page.locator("#model option")).to_have_count(1)
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", "2")
    found.send()
    kept = page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert kept == "[{},{}]"
    assert context.cookies() == []
    assert not any("sesame" in url for url in found.urls)
    assert "sesame" not in page.content()
    assert "$ROPEWALK_API_KEY" in _code(page, "curl")
    context.close()


def test_a_hostile_answer_stays_text(opened: Watched) -> None:
    """Markup in an answer is shown and creates no element."""
    hostile = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    event = {"choices": [{"index": 0, "text": hostile, "finish_reason": "stop"}]}
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    opened.page.route(
        "**/v1/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=stream),
    )
    opened.page.fill("#prompt", "x")
    opened.send()
    assert opened.page.locator("#answer-a .output").text_content() == hostile
    assert opened.page.locator(".output img, .output script").count() == 0
    assert opened.page.title() == "ropewalk playground"


def test_headers_are_exact(server: Server) -> None:
    """Every file has the policy, and an unchanged file is not sent again."""
    for path, file in page_files().items():
        response = httpx.get(f"{server.url}{path}")
        assert response.content == file.content
        assert HEADERS.items() <= {**response.headers, **HEADERS}.items()
        assert {name: response.headers[name] for name in HEADERS} == HEADERS
        again = httpx.get(f"{server.url}{path}", headers={"If-None-Match": file.etag})
        assert again.status_code == 304
    assert httpx.get(f"{server.url}/").headers["location"] == "playground/"


def test_head_is_answered_as_get_without_a_body(server: Server) -> None:
    """A monitor may ask for the headers only."""
    for path in ("/", *page_files()):
        full, head = (getattr(httpx, each)(f"{server.url}{path}") for each in ("get", "head"))
        assert head.status_code == full.status_code, path
        assert head.content == b""
        varying = {"date", "x-request-id"}
        one, other = (
            {k: v for k, v in each.headers.items() if k not in varying} for each in (full, head)
        )
        assert one == other, path


@pytest.mark.parametrize(
    ("query", "message", "param"),
    [
        (
            {"context_len": 512, "deptt": 0.5},
            "`deptt` is not a parameter of this route, remove it. Did you mean `depth`?",
            "deptt",
        ),
        ({"context_len": 63}, "`context_len` must be 64 to 2048 tokens. Given: 63", "context_len"),
    ],
)
def test_a_wrong_query_is_one_sentence(
    server: Server, query: dict[str, float], message: str, param: str
) -> None:
    """A misspelt parameter is refused and not ignored."""
    answer = httpx.get(f"{server.url}/playground/needle", params=query, timeout=30)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (message, param)


def test_the_files_are_small_and_ask_no_one_else() -> None:
    """All files together stay below 80 KB. They never set HTML, and name no other host."""
    files = page_files()
    assert sum(len(file.content) for file in files.values()) < 80_000
    for path, file in files.items():
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        for wrong in ("innerHTML", "outerHTML", "eval(", "http:", "https:", "style="):
            assert wrong not in text, path
        assert len(text.splitlines()) <= 350, path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(browser: Browser, server: Server, scheme: str) -> None:
    """Axe finds nothing, also on a narrow screen and in a dialog."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 320, "height": 700})
    found = watched(context.new_page())
    page = found.open(f"{server.url}/playground/")
    page.check("#logprobs")
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", "4")
    found.send()
    is_wide = "() => document.documentElement.scrollWidth > innerWidth"
    assert page.evaluate(is_wide) is False
    for opener in (None, "#help-button", ".token"):
        if opener is not None:
            page.locator(opener).first.click()
        report = Axe().run(page)
        assert report.violations_count == 0, report.generate_report()
        page.keyboard.press("Escape")
    context.close()
