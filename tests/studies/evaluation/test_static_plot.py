"""static.png: its numbers, its percentage, and the picture of the README."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ropewalk.studies.evaluation.cells import WindowScore
from ropewalk.studies.evaluation.plan import Variant
from ropewalk.studies.evaluation.plot import plot_static
from ropewalk.studies.evaluation.report import LengthReport, LengthRow, added_cost

ROOT = Path(__file__).resolve().parents[3]
LENS = (128, 256, 512)
NONE, FIXED = Variant("none", None), Variant("yarn", "fixed")
FITTING = Variant("yarn", "by_position")
# nats a token of two windows of 10 and 20 tokens, at each length
NATS = {
    NONE: ((2.0, 3.0), (2.0, 2.6), (4.0, 6.0)),
    FIXED: ((2.3, 3.1), (2.2, 2.7), (2.2, 2.5)),
    FITTING: ((2.0, 3.0), (2.0, 2.6), (2.0, 2.5)),
    Variant("ntk", "fixed"): ((2.1, 3.0), (2.1, 2.6), (3.0, 4.0)),
    Variant("ntk", "by_position"): ((2.0, 3.0), (2.0, 2.6), (3.0, 4.0)),
}


def report(*variants: Variant) -> LengthReport:
    """A report of these variants, as if it had been measured."""
    rows = []
    for variant in variants:
        for context_len, nats in zip(LENS, NATS[variant], strict=True):
            windows: list[Any] = [
                WindowScore("x", each * tokens, tokens, 4 * tokens)
                for each, tokens in zip(nats, (10, 20), strict=True)
            ]
            rows.append(LengthRow(variant, context_len, 8.0, {"perplexity": windows}))
    plan = SimpleNamespace(native_len=256, context_lens=LENS, variants=variants)
    made: Any = SimpleNamespace(plan=plan, rows=rows, model="m")
    made.of = lambda variant: [row for row in rows if row.variant == variant]
    return made


def numbers(picture: Path) -> dict[str, list[float]]:
    """The numbers that the picture has in its description."""
    with Image.open(picture) as image:
        found: dict[str, list[float]] = json.loads(image.text["Description"])
    return found


def test_the_lines_are_the_perplexities_of_the_best_method(tmp_path: Path) -> None:
    """Perplexity is exp of the mean of nats a token; YaRN's is the lowest at the longest length."""
    plot_static(report(*NATS), tmp_path / "static.png", "m")
    found = numbers(tmp_path / "static.png")
    assert found["context_lens"] == list(LENS)
    for name, variant in (("none", NONE), ("fixed", FIXED), ("fitting", FITTING)):
        assert found[name] == pytest.approx(np.exp(np.mean(NATS[variant], axis=1)))


def test_the_cost_compares_windows_in_pairs() -> None:
    """The windows differ by a nat, and their differences by a tenth."""
    made = report(FIXED, FITTING)
    ratio = added_cost(made.of(FIXED)[1], made.of(FITTING)[1])
    differences = np.array([0.2, 0.1])
    reach = 1.959964 * differences.std(ddof=1) / math.sqrt(2)
    expected = np.exp([differences.mean(), differences.mean() - reach, differences.mean() + reach])
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx(list(expected))


@pytest.mark.parametrize("variants", [(NONE, FITTING), (FIXED, FITTING)])
def test_without_all_three_lines_there_is_no_picture(
    tmp_path: Path, variants: tuple[Variant, ...]
) -> None:
    """The rest of the run is written as before."""
    plot_static(report(*variants), tmp_path / "static.png", "m")
    assert not list(tmp_path.iterdir())


def shown_in(text: str, row: str) -> list[float]:
    """The perplexities of a table's row, without their intervals."""
    cells = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", text, re.MULTILINE)
    assert cells is not None
    return [float(each.split(" [")[0].replace(",", "")) for each in cells[1].split(" | ")]


@pytest.mark.parametrize(
    ("picture", "section"),
    [
        ("static-scaling.png", "## Against context length"),
        ("smollm2-static.png", "## By position, or one table"),
    ],
)
def test_a_picture_has_the_numbers_of_its_table(picture: str, section: str) -> None:
    """It is not older than the table that was measured by the same command."""
    found = numbers(ROOT / "docs/images" / picture)
    page = (ROOT / "benchmarks/results/quality.md").read_text().partition(section)[2]
    table = page.partition("Perplexity, by context")[2]
    for name, row in (("none", "none"), ("fixed", "yarn fixed"), ("fitting", "yarn by_position")):
        assert shown_in(table, row) == pytest.approx(found[name], rel=5e-3)


def test_pages_say_what_their_pictures_show() -> None:
    """README has the picture of a real model, and the embedded model's page has its own."""
    found = numbers(ROOT / "docs/images/static-scaling.png")
    page = (ROOT / "docs/design/embedded-model.md").read_text()
    at = found["context_lens"].index(256)
    assert f"{100 * (found['fixed'][at] / found['fitting'][at] - 1):.0f} % higher at 256" in page
    assert f"perplexity is {found['none'][2]:.0f} at twice" in page
    assert f"and {found['none'][-1]:,.0f} at eight times" in page
    found = numbers(ROOT / "docs/images/smollm2-static.png")
    readme = (ROOT / "README.md").read_text()
    within = range(found["context_lens"].index(8192) + 1)
    added = [100 * (found["fixed"][at] / found["fitting"][at] - 1) for at in within]
    assert f"it is {min(added):.0f} to {max(added):.0f} % higher at 512 to 8,192" in readme
    at = found["context_lens"].index(16384)
    assert f"perplexity is {found['none'][at]:,.0f} at twice" in readme


def test_the_numbers_beside_other_servers_are_those_of_the_results() -> None:
    """Each row of the README's table has its numbers in one row of a page of results."""
    readme = (ROOT / "README.md").read_text()
    pages = (ROOT / "benchmarks/results").glob("*.md")
    measured = [line for page in pages for line in page.read_text().splitlines()]
    rows = re.findall(r"^\| .* \| ([\d.,]+) / ([\d.,]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        assert any(set(row) <= set(re.findall(r"[\d.,]*\d", line)) for line in measured), row
