"""The page while an answer that it needs is on its way: what cannot be sent yet."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.playground.conftest import Watched, watched
from tests.servers.processes import Server


@pytest.fixture
def unopened(browser: Browser) -> Iterator[Watched]:
    """A page before its first address."""
    context = browser.new_context()
    yield watched(context.new_page())
    context.close()


class _Held:
    """The first request of a pattern, which waits until the test lets it go; others go on."""

    def __init__(self, page: Page, pattern: str) -> None:
        self._page = page
        self._found: Route | None = None
        page.route(pattern, lambda route: self._hold(route))  # noqa: PLW0108  # Playwright sets an attribute on it

    def _hold(self, route: Route) -> None:
        if self._found is None:
            self._found = route
        else:
            route.continue_()

    def route(self) -> Route:
        """Wait for the request."""
        while self._found is None:  # the suite's limit of a test ends it
            self._page.wait_for_timeout(20)
        return self._found


def test_a_prompt_cannot_be_sent_before_the_served_names_are_known(
    unopened: Watched, server: Server
) -> None:
    """A click on Send waits for them, and no click is lost."""
    page = unopened.page
    names = _Held(page, "**/v1/models")
    page.goto(f"{server.url}/playground/")
    held = names.route()
    page.fill("#prompt", "x = 1\n")
    page.fill("#max-tokens", "2")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#needle")).to_be_disabled()
    assert page.locator("#server-state").text_content() != "ready"
    held.continue_()
    unopened.send()


def test_the_names_are_asked_for_again_after_an_error(unopened: Watched, server: Server) -> None:
    """The page tells the error meanwhile, and becomes ready without a reload."""
    page = unopened.page
    names = _Held(page, "**/v1/models")
    page.goto(f"{server.url}/playground/")
    held = names.route()
    held.abort()
    expect(page.locator("#server-state")).to_have_text("The server cannot be reached.")
    expect(page.locator("#server-state")).to_have_text("ready")


def test_a_prompt_cannot_be_sent_while_the_needle_is_filled_in(
    unopened: Watched, server: Server
) -> None:
    """Neither Send nor Ctrl+Enter sends the empty prompt that the needle's will replace."""
    page = unopened.open(f"{server.url}/playground/")
    needles = _Held(page, "**/playground/needle*")
    page.fill("#needle-len", "300")
    page.click("#needle")
    held = needles.route()
    expect(page.locator("#status")).to_have_text("filling in")
    expect(page.locator("#send")).to_be_disabled()
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    held.continue_()
    expect(page.locator("#status")).to_contain_text("is hidden")
    expect(page.locator("#send")).to_be_enabled()
    assert not any(url.endswith("/v1/completions") for url in unopened.urls)
