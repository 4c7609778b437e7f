"""How the page and the reference look: in the first view, on a narrow screen, in the dark."""

import re
from itertools import pairwise

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.playground.conftest import Watched, watched
from tests.servers.processes import Server


@pytest.fixture
def small(opened: Watched) -> Watched:
    """The page in the view of a small laptop."""
    opened.page.set_viewport_size({"width": 1280, "height": 800})
    return opened


def test_prompt_settings_and_chart_are_in_the_first_view(small: Watched) -> None:
    """The chart is seen without scrolling, and the form has columns."""
    for part in ("#send", "#compare-with", "#chart", ".legend"):
        box = small.page.locator(part).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800, part
    for names in (("rope-type", "rope-factor", "rope-policy"), ("max-tokens", "seed")):
        boxes = [small.page.locator(f"#{name}").bounding_box() for name in names]
        assert (
            len({(round(box["y"]), round(box["width"])) for box in boxes if box is not None}) == 1
        ), names


def test_no_label_of_the_chart_is_cut_or_covered(small: Watched) -> None:
    """For the server's buckets, and for those of a long context."""
    boxes = """async (bounds) => {
      const { noteStats, drawChart } = await import("./chart.js");
      const stats = await (await fetch("../stats")).json();
      if (bounds) {
        stats.context_bounds = bounds;
        for (const name of ["time_to_first_token_seconds", "inter_token_latency_seconds"]) {
          stats[name].counts = [...bounds, 0].map(() => stats[name].counts[0]);
        }
      }
      noteStats(stats);
      drawChart();
      const box = (element) => element.getBoundingClientRect().toJSON();
      const labels = [...document.querySelectorAll("#chart text[text-anchor]")];
      const told = labels.map((each) => [each.textContent, box(each)]);
      return [box(document.getElementById("chart")), told];
    }"""
    for bounds in (None, [2**power for power in range(4, 21)]):
        chart, labels = small.page.evaluate(boxes, bounds)
        lengths = [(text, box) for text, box in labels if re.fullmatch(r"(> )?[0-9,]+", text)]
        assert len(lengths) >= 3
        assert any(text.startswith("> ") for text, _ in lengths)
        for text, box in labels:
            assert chart["left"] <= box["left"], text
            assert box["right"] <= chart["right"], text
        for (_, one), (text, other) in pairwise(lengths):
            assert one["right"] < other["left"], text
        # Each label is under its length; the axis is logarithmic, and the bounds double.
        centres = [(box["left"] + box["right"]) / 2 for _, box in lengths]
        gaps = [right - left for left, right in pairwise(centres)]
        assert max(gaps) - min(gaps) < 1.5, gaps


def test_the_empty_page_invites_to_the_demo(small: Watched) -> None:
    """The panes come with the first answer, and go when all is cleared."""
    page = small.page
    expect(page.locator("#invitation")).to_contain_text("Press Fill in")
    expect(page.locator(".answer").first).to_be_hidden()
    page.fill("#prompt", "x = 1\n")
    page.fill("#max-tokens", "2")
    small.send()
    expect(page.locator("#invitation")).to_be_hidden()
    expect(page.locator("#answer-a")).to_be_visible()
    expect(page.locator("#answer-b")).to_be_hidden()
    page.click("#clear")
    expect(page.locator("#invitation")).to_be_visible()
    expect(page.locator("#answer-a")).to_be_hidden()


def test_help_explains_the_words_of_the_page(small: Watched) -> None:
    """It begins with them, and every policy of the form is explained."""
    page = small.page
    page.click("#help-button")
    words = page.locator("#help dt").all_text_contents()
    assert words[:5] == ["L", "Scaling", "Factor", "Tier", "Policy"]
    expect(page.locator("#help h2").first).to_be_in_viewport()
    policies = page.locator("#rope-policy option").all_text_contents()
    told = page.locator("#help dl").first.text_content() or ""
    assert all(policy in told.lower() for policy in policies)


def test_dark_shows_its_state(small: Watched) -> None:
    """The pressed button looks different."""
    colour = "() => getComputedStyle(document.getElementById('theme')).backgroundColor"
    page = small.page
    before = page.evaluate(colour)
    page.click("#theme")
    expect(page.locator("#theme")).to_have_attribute("aria-pressed", "true")
    dark = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) == before != dark


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_reference_fits_a_narrow_screen_in_both_schemes(
    browser: Browser, server: Server, scheme: str
) -> None:
    """It is as wide as the screen, and has the colours of the scheme."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 400, "height": 800})
    found = watched(context.new_page())
    page = found.page
    page.goto(f"{server.url}/docs")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 400
    style = "() => getComputedStyle(document.body).backgroundColor"
    channels = [int(each) for each in re.findall(r"\d+", page.evaluate(style))]
    assert (sum(channels) < 3 * 128) == (scheme == "dark")
    if scheme == "dark":  # a run of Axe over this long page takes seconds
        report = Axe().run(page)
        assert report.violations_count == 0, report.generate_report()
    assert found.complaints == []
    context.close()
