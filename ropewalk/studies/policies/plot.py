"""Plots of perplexity, retrieval and time by the number of tier changes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.studies.harness.frame import Row
from ropewalk.studies.harness.intervals import Estimate
from ropewalk.studies.harness.plotting import milliseconds_text, new_figure, tidy, use_log_scale
from ropewalk.studies.policies.measure import CROSSING_POLICIES
from ropewalk.studies.policies.report import CrossingReport, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinct for colour-blind readers; markers are distinct in grey.
_COLOURS = {"fixed": "#0072b2", "grow": "#009e73", "grow-exact": "#56b4e9", "stale": "#d55e00"}
_MARKERS = {"fixed": "o", "grow": "^", "grow-exact": "s", "stale": "X"}
_APART = 0.12  # of one tier change, so that markers of equal height are all visible
_LABELS = (
    "perplexity after the\nlast crossing (log scale)",
    "needles found\nacross it (share)",
    "time of the token\nat it (log scale)",
)


def plot(report: CrossingReport, path: Path) -> None:
    """Draw a column of three panels for each method; needs matplotlib."""
    rows = rows_of(report.outcomes)
    methods = list(dict.fromkeys(each["method"] for each in rows))
    title = (
        f"{report.model}: what happens to cached keys when the table changes\n"
        f"{max(each['num_windows'] for each in rows)} windows, 95 % intervals"
    )
    with new_figure(path, 2.5 + 4.5 * len(methods), 9.5, title) as figure:
        panels = figure.subplots(3, len(methods), sharex=True, sharey="row", squeeze=False)
        for column, method in enumerate(methods):
            own = [each for each in rows if each["method"] == method]
            _draw(panels[0, column], own, [each["perplexity"] for each in own])
            _draw(panels[1, column], own, [each["retrieval"] for each in own])
            # The median time at the last tier change, or of an ordinary step if there is none.
            gaps = [each["crossing_ms"] or each["step_ms"] for each in own]
            _draw(panels[2, column], own, [Estimate(each, None, None) for each in gaps])
            panels[0, column].set_title(method)
            crossings = sorted({each["num_crossings"] for each in own})
            panels[2, column].set_xticks(
                crossings, [_reach(each, report.native_len) for each in crossings]
            )
            panels[2, column].set_xlabel("tiers crossed while decoding")
        panels[1, 0].set_ylim(-0.05, 1.05)
        use_log_scale(panels[0], _edges(panels[0]), lambda value: f"{value:g}")
        use_log_scale(panels[2], _edges(panels[2]), milliseconds_text)
        for panel, label in zip(panels[:, 0], _LABELS, strict=True):
            panel.set_ylabel(label)
        # Beside the panels, because bars may be anywhere inside.
        handles = panels[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside right upper", frameon=False, title="policy")
        figure.align_ylabels()


def _edges(row: Sequence["Axes"]) -> list[float]:
    """Return the lowest and highest value that each panel of a row draws, as a log scale can."""
    edges = [float(edge) for axes in row for edge in axes.dataLim.intervaly]
    return [edge for edge in edges if 0 < edge < math.inf]


def _reach(num_crossings: int, native_len: int) -> str:
    first, last = native_len, native_len << num_crossings
    return f"{num_crossings}\n{first:,} \u2192 {last:,}"


def _draw(axes: "Axes", rows: Sequence[Row], found: Sequence[Estimate]) -> None:
    """Draw a marker with an interval for each row, policies beside each other."""
    for place, policy in enumerate(CROSSING_POLICIES):
        shift = (place - (len(CROSSING_POLICIES) - 1) / 2) * _APART
        own = [
            (row["num_crossings"] + shift, each)
            for row, each in zip(rows, found, strict=True)
            if row["policy"] == policy
        ]
        if own:
            axes.errorbar(
                [at for at, _ in own],
                [each.value for _, each in own],
                yerr=list(zip(*(each.reaches() for _, each in own), strict=True)),
                fmt=_MARKERS[policy],
                color=_COLOURS[policy],
                capsize=3,
                label=policy,
            )
    tidy(axes, "y")
