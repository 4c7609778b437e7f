"""The axes of the plot of `ropewalk bench`, for few lengths and for many."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from ropewalk.studies.bench import plot as drawing
from ropewalk.studies.bench.report import spread

SIX = (64, 128, 256, 512, 1024, 2032)


def report_of(lens: Sequence[int], first_s: float, growth: float, gap_s: float | None) -> Any:
    """A report with made-up times: the first token after `first_s`, longer with each length."""
    rows = []
    for number, length in enumerate(lens):
        first = first_s * growth**number
        rows.append(
            {
                "num_measured": 3,
                "prompt_tokens": float(length),
                "time_to_first_token_s": spread([first, 1.1 * first, 1.3 * first]),
                "inter_token_s": None if gap_s is None else spread([gap_s, 1.2 * gap_s]),
            }
        )
    plan = SimpleNamespace(num_requests=3, concurrency=1, output_tokens=10)
    return SimpleNamespace(
        summaries=lambda: rows,
        plan=plan,
        target=SimpleNamespace(model="ropewalk-demo"),
        started_at="2026-11-22T00:00:00",
        num_drafted=None,
    )


def drawn(report: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure that is written."""
    figures = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    drawing.plot(report, path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    return figures[0]


def visible(axis: Axis) -> list[str]:
    """The labels of the ticks within the limits."""
    low, high = axis.get_view_interval()
    labels = [text.get_text() for text in axis.get_ticklabels()]
    places = axis.get_ticklocs()
    near = 1e-9 * high
    return [
        text
        for text, at in zip(labels, places, strict=True)
        if text and low - near <= at <= high + near
    ]


@pytest.mark.parametrize(
    ("lens", "first_s", "growth"), [((300,), 0.031, 1.8), ((64, 300), 0.052, 1.0), (SIX, 0.4, 3.0)]
)
def test_each_axis_has_a_label_its_scale_and_three_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lens: Sequence[int], first_s: float,
    growth: float,
) -> None:  # fmt: skip
    """The lowest time has a tick at or below it."""
    report = report_of(lens, first_s, growth, 0.0123)
    figure = drawn(report, tmp_path / "out.png", monkeypatch)
    first, between = figure.axes
    assert "log scale" in first.get_ylabel()
    assert "linear scale" in between.get_ylabel()
    assert "log scale" in between.get_xlabel()
    for axis in (first.yaxis, between.yaxis, between.xaxis):
        assert len(visible(axis)) >= 3, visible(axis)
    for axis in (first.yaxis, between.yaxis):
        assert all(text.endswith((" ms", " s")) for text in visible(axis))
    assert {f"{each:,}" for each in lens} <= set(visible(between.xaxis))
    low, high = first.get_ylim()
    ticks = first.get_yticks()
    assert ticks[0] == pytest.approx(low, rel=0.05)
    assert ticks[-1] == pytest.approx(high, rel=0.05)
    assert low <= 1000 * first_s


def test_one_token_each_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no gap between tokens, so the panel has words instead of a scale."""
    figure = drawn(report_of((64, 300), 0.05, 2.0, None), tmp_path / "out.png", monkeypatch)
    between = figure.axes[1]
    assert [text.get_text() for text in between.texts] == ["no answer has a second token"]
    assert not visible(between.yaxis)
