"""The plots of `ropewalk eval`: names, lines that can be distinguished, and the text of a cell."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from ropewalk.studies.evaluation.cells import RETRIEVAL, QueryScore, Score
from ropewalk.studies.evaluation.plan import Variant
from ropewalk.studies.evaluation.plot import _heat_map, _lines
from ropewalk.studies.evaluation.report import LengthRow


def drawn(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], None]) -> Figure:
    """The figure that would be written."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw()
    return figures[0]


def report_of(shares: dict[Variant, list[int]]) -> Any:
    """A report with made-up numbers of right answers to eight questions, by variant and length."""
    lens = (128, 256, 512)

    def queries(num_right: int) -> list[Score]:
        return [QueryScore("print", at / 7, 0, at < num_right, "") for at in range(8)]

    rows = {
        variant: [
            LengthRow(variant, length, 1.0, {RETRIEVAL: queries(num_right)})
            for length, num_right in zip(lens, numbers, strict=True)
        ]
        for variant, numbers in shares.items()
    }
    plan = SimpleNamespace(native_len=256, context_lens=lens, variants=list(shares))
    return SimpleNamespace(plan=plan, of=rows.__getitem__, model="m")


def test_equal_variants_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their markers stand beside each other, the legend says so, and intervals are bars."""
    fixed, grow, linear = (
        Variant("yarn", "fixed"),
        Variant("yarn", "grow"),
        Variant("linear", "fixed"),
    )
    report = report_of({fixed: [8, 8, 6], grow: [8, 8, 6], linear: [8, 1, 0]})
    figure = drawn(
        monkeypatch,
        lambda: _lines(report, tmp_path / "a.png", "t", "right answers", lambda row: row.retrieval),
    )
    (axes,) = figure.axes
    lines = axes.lines[:3]
    assert [str(line.get_label()) for line in lines] == [
        "yarn fixed",
        "yarn grow\n(equal to yarn fixed)",
        "linear fixed",
    ]
    for at in range(3):
        places = [axes.transData.transform(line.get_xydata()[at])[0] for line in lines]
        assert places == sorted(places)
        assert places[1] - places[0] > 3  # pixels
    assert not axes.patches
    bars = [each for each in axes.collections if isinstance(each, LineCollection)]
    assert [len(each.get_segments()) for each in bars] == [3, 3, 3]


def test_a_cell_says_how_many_questions_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of eight questions are in each quarter of the depth."""
    report = report_of({Variant("yarn", "by_position"): [8, 3, 0]})
    figure = drawn(monkeypatch, lambda: _heat_map(report, tmp_path / "a.png", "trained for 256"))
    cells = [text.get_text() for text in figure.axes[0].texts]
    assert cells == [*("2/2", "2/2", "0/2"), *("2/2", "1/2", "0/2"), *("2/2", "0/2", "0/2") * 2]
