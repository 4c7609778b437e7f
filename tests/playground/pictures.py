"""`python -m tests.playground.pictures`: the screenshots of the playground's page, from a server.

It serves the embedded model, sends requests of many lengths, and compares one hidden value with and
without scaling. The files go to docs/images.
"""

import shutil
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect, sync_playwright

from tests.playground.conftest import ARGUMENTS, watched
from tests.servers.processes import running_server

IMAGES = Path(__file__).parents[2] / "docs/images"
_MARGIN = 8  # pixels around a part of the page
_LENGTHS = (10, 40, 100, 200, 400, 800, 1500, 1900)


def main() -> None:
    """Write playground-compare.png and playground-chart.png."""
    with running_server() as server, sync_playwright() as playwright:
        for length in _LENGTHS * 4:
            body = {"prompt": [length % 500 + at % 300 for at in range(length)], "max_tokens": 16}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(ARGUMENTS)
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        found = watched(page)
        found.open(f"{server.url}/playground/")
        while page.locator("#answer-a .verdict").text_content() != "✓ found":  # it may miss one
            page.click("#needle")
            expect(page.locator("#status")).to_contain_text("is hidden")
            found.send()
        page.evaluate("""() => {
          const prompt = document.getElementById("prompt");
          prompt.rows = 7;
          prompt.scrollTop = prompt.scrollHeight;  // the question
        }""")
        page.wait_for_timeout(3000)  # for the next answer of /stats
        _shot(page, ".work", "#difference", "playground-compare.png")
        _shot(page, "[aria-label=Latency]", ".legend", "playground-chart.png")
        browser.close()


def _shot(page: Page, part: str, last: str, name: str) -> None:
    """Write a part of the page, from its top to the end of its element `last`."""
    whole, end = (page.locator(each).bounding_box() for each in (part, last))
    assert whole is not None
    assert end is not None
    whole["height"] = end["y"] + end["height"] - whole["y"] + 2 * _MARGIN
    whole["width"] += 2 * _MARGIN
    whole["x"] -= _MARGIN
    whole["y"] -= _MARGIN
    page.screenshot(path=IMAGES / name, clip=whole)


if __name__ == "__main__":
    main()
