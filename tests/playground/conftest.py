"""A real Chromium (Debian's package), steered by Playwright, and a server of the embedded model."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.servers.processes import Server, running_server
from tests.servers.programs import program

# Tests run as root in containers, where Chromium's sandbox cannot start.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for a module's tests; Playwright's event loop must not outlive them."""
    path = program("chromium", package="chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield running
        running.close()


@dataclass
class Watched:
    """A page with everything that it complained of and every address that it asked."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def open(self, url: str) -> Page:
        """Open an address, and wait until a prompt can be sent."""
        self.page.goto(url)
        expect(self.page.locator("#server-state")).to_have_text("ready", timeout=60_000)
        return self.page

    def send(self) -> None:
        """Send the prompt, and wait for the end of the answer."""
        self.page.click("#send")
        expect(self.page.locator("#status")).to_contain_text("done", timeout=60_000)


def watched(page: Page) -> Watched:
    """Watch a page from its first request on."""
    found = Watched(page)
    page.on("console", lambda message: found.complaints.append(message.text))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("request", lambda request: found.urls.append(request.url))
    return found


@pytest.fixture
def opened(browser: Browser, server: Server) -> Iterator[Watched]:
    """The page of the shared server, which must stay silent and ask this server only."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = watched(context.new_page())
    found.open(f"{server.url}/playground/")
    yield found
    context.close()
    assert found.complaints == []
    assert [url for url in found.urls if not url.startswith(server.url)] == []


@pytest.fixture(scope="session")
def locked() -> Iterator[Server]:
    """A server that asks for a key."""
    with running_server("--api-key", "sesame", "--max-model-len", "256") as running:
        yield running
