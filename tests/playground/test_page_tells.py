"""The page tells the tier before sending, an end by the tier, times of one answer alone."""

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.playground.conftest import Watched
from tests.servers.processes import Server

LONG = "word = word + 1\n" * 60  # beyond L, and within 2 L


def facts(opened: Watched, pane: str = "a") -> str:
    """The line of numbers below an answer."""
    return opened.page.locator(f"#answer-{pane} .facts").text_content() or ""


@pytest.mark.parametrize(
    ("text", "settings", "told"),
    [
        ("a = 1\n", {}, "tier 1x default"),
        (LONG, {}, "tier 2x yarn"),
        (LONG, {"rope-type": "default"}, "tier 1x default, beyond the trained length"),
        (LONG, {"rope-factor": "3"}, "tier 4x yarn"),
        ("a = 1\n", {"rope-policy": "fixed"}, "tier 8x yarn"),
        ("a = 1\n", {"max-tokens": "600"}, "tier 1x default"),
    ],
)
def test_the_bar_tells_the_tier_of_the_answer(
    opened: Watched, server: Server, text: str, settings: dict[str, str], told: str
) -> None:
    """The tokens are those of /tokenize; the answer then has this tier."""
    page = opened.page
    page.fill("#max-tokens", "4")
    page.fill("#prompt", text)
    for name, value in settings.items():
        field = page.locator(f"#{name}")
        if name in {"rope-type", "rope-policy"}:
            field.select_option(value)
        else:
            field.fill(value)
    count = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["count"]
    expect(page.locator("#context-text")).to_have_text(f"{count:,} of 2,048 tokens, {told}")
    assert page.locator("#context").get_attribute("aria-valuenow") == str(count)
    page.fill("#stop", " ")  # the answer ends before it leaves its tier
    opened.send()
    _, factor, rope_type = told.partition(",")[0].split()
    assert facts(opened).startswith(f"{rope_type} {factor} ")


def test_the_bar_tells_why_a_request_will_be_refused(opened: Watched) -> None:
    """The sentence is the server's, and the count stays."""
    opened.page.fill("#prompt", "a = 1\n")
    opened.page.fill("#rope-factor", "99")
    expected = "of 2,048 tokens. `rope.factor` must be between 1 and 8. Given: 99"
    expect(opened.page.locator("#context-text")).to_contain_text(expected)


@pytest.mark.parametrize("text", ["hello", "word " * 400, ""])
@pytest.mark.parametrize(
    ("max_tokens", "rope"),
    [(None, None), (30, {"rope_type": "default"}), (900, None), (900, {"policy": "grow"})],
)
def test_the_route_tells_the_rope_of_the_answer(
    server: Server, text: str, max_tokens: int | None, rope: dict[str, str] | None
) -> None:
    """For a prompt and for messages, with max_tokens and without."""
    for path, given in (
        ("completions", {"prompt": text}),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        body = {**given, "max_tokens": max_tokens, "rope": rope}
        told = httpx.post(f"{server.url}/playground/tier", json=body, timeout=60).json()
        # Stops that come soon, so that long answers need no time.
        stops = {"temperature": 0, "stop": [" ", "e", "t", "\n"]}
        url = f"{server.url}/v1/{path}"
        answer = httpx.post(url, json={**body, **stops}, timeout=60).json()
        found = answer["choices"][0]["rope"]
        found.pop("ended_by", None)
        assert told["count"] == answer["usage"]["prompt_tokens"]
        assert told["rope"] == found
        assert told["tier_len"] >= told["count"]


def test_the_settings_that_are_compared_are_answered_one_after_the_other(opened: Watched) -> None:
    """Two at once would share the engine, and each would show the time of both."""
    page = opened.page
    asked: list[Route] = []
    page.route("**/v1/completions", lambda route: asked.append(route))  # noqa: PLW0108  # Playwright sets an attribute on it
    page.fill("#prompt", LONG)
    page.fill("#max-tokens", "8")
    page.check("#compare")
    page.click("#send")
    expect(page.locator("#status")).to_have_text("answering A")
    page.wait_for_timeout(300)
    assert len(asked) == 1
    asked[0].continue_()
    expect(page.locator("#status")).to_have_text("answering B", timeout=60_000)
    assert "yarn 2x" in facts(opened)
    while len(asked) < 2:
        page.wait_for_timeout(20)
    asked[1].continue_()
    expect(page.locator("#status")).to_contain_text("done", timeout=60_000)
    assert "default 1x" in facts(opened, "b")


def test_a_prompt_from_the_cache_is_told(opened: Watched) -> None:
    """Otherwise the time to the first token would mislead."""
    opened.page.fill("#prompt", f"{LONG}# twice\n")
    opened.page.fill("#max-tokens", "2")
    for _ in range(2):
        opened.send()
    assert " from the cache" in facts(opened)


def test_an_empty_prompt_is_sent_only_if_it_is_meant(opened: Watched) -> None:
    """The page asks, and Escape and Cancel send nothing."""
    page = opened.page
    page.fill("#max-tokens", "2")
    for leave in ("Escape", "Enter"):  # Enter presses Cancel, which has the focus
        page.click("#send")
        expect(page.locator("#empty-dialog")).to_be_visible()
        page.keyboard.press(leave)
        expect(page.locator("#empty-dialog")).to_be_hidden()
    assert not any(url.endswith("/v1/completions") for url in opened.urls)
    page.click("#send")
    page.locator("#empty-dialog button", has_text="Send").click()
    expect(page.locator("#status")).to_contain_text("done", timeout=60_000)
    assert " 1 + 2 tokens" in facts(opened)


def test_an_answer_that_fills_its_tier_says_so(opened: Watched) -> None:
    """A chat without max tokens runs to the end of the longest tier; with them, it says length."""
    page = opened.page
    page.check("#mode-chat")
    for max_tokens, reason in (("", "tier"), ("3", "length")):
        page.fill("#max-tokens", max_tokens)
        page.fill("#prompt", "hello")
        opened.send()
        assert facts(opened).endswith(f"ended by {reason}")
        page.click("#clear")  # a conversation that has filled the tier has room for nothing else
