"""`python -m tests.playground.pictures`: the README's screenshots, from a running server.

It serves the embedded model, sends requests of many lengths, and compares one hidden value with and
without scaling. The files go to docs/images.
"""

import shutil
from pathlib import Path

import httpx
from playwright.sync_api import expect, sync_playwright

from tests.playground.conftest import ARGUMENTS, watched
from tests.processes import running_server

IMAGES = Path(__file__).parents[2] / "docs/images"
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
        found = watched(browser.new_page(viewport={"width": 1280, "height": 720}))
        page = found.open(f"{server.url}/playground/")
        page.fill("#needle-len", "2032")
        page.click("#needle")
        expect(page.locator("#status")).to_contain_text("is hidden")
        found.send()
        page.wait_for_timeout(3000)  # for the next answer of /stats
        page.locator(".work").screenshot(path=IMAGES / "playground-compare.png")
        page.locator("[aria-label=Latency]").screenshot(path=IMAGES / "playground-chart.png")
        browser.close()


if __name__ == "__main__":
    main()
