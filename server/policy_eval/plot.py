"""Plots of perplexity, retrieval and time by the number of tier changes."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server.policy_eval.measure import CROSSING_POLICIES
from server.policy_eval.report import CrossingReport, CrossingRow, rows_of
from server.study.intervals import Estimate
from server.study.plotting import milliseconds_text, use_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinct for colour-blind readers; markers are distinct in grey.
_COLOURS = {"pinned": "#0072b2", "grow": "#009e73", "grow-exact": "#56b4e9", "stale": "#d55e00"}
_MARKERS = {"pinned": "o", "grow": "^", "grow-exact": "s", "stale": "X"}
_APART = 0.12  # of one tier change, so that markers of equal height are all visible


def plot(report: CrossingReport, path: Path) -> None:
    """Draw a column of three panels for each method; needs matplotlib."""
    # Optional, and slow to import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = rows_of(report.outcomes)
    methods = list(dict.fromkeys(each.method for each in rows))
    figure = Figure(figsize=(2.5 + 4.5 * len(methods), 9.5), layout="constrained")
    panels = figure.subplots(3, len(methods), sharex=True, sharey="row", squeeze=False)
    for column, method in enumerate(methods):
        own = [each for each in rows if each.method == method]
        perplexity, retrieval, gap = panels[:, column]
        perplexity.set_title(method)
        _draw(perplexity, own, lambda row: row.perplexity)
        _draw(retrieval, own, lambda row: row.retrieval)
        _draw(gap, own, _longest_gap)
        retrieval.set_ylim(-0.05, 1.05)
        crossings = sorted({each.num_crossings for each in own})
        gap.set_xticks(crossings, [_reach(each, report.native_len) for each in crossings])
        gap.set_xlabel("tiers crossed while decoding")
    use_log_scale(panels[0], _edges(panels[0]), lambda value: f"{value:g}")
    use_log_scale(panels[2], _edges(panels[2]), milliseconds_text)
    panels[0, 0].set_ylabel("perplexity after the\nlast crossing (log scale)")
    panels[1, 0].set_ylabel("needles found\nacross it (share)")
    panels[2, 0].set_ylabel("time of the token\nat it (log scale)")
    # Beside the panels, because bars may be anywhere inside.
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        title="policy",
    )
    figure.align_ylabels()
    figure.suptitle(
        f"{report.model}: what happens to cached keys when the table changes\n"
        f"{max(each.num_windows for each in rows)} windows, 95 % intervals",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _edges(row: Sequence["Axes"]) -> list[float]:
    """Return the lowest and highest value that each panel of a row draws, as a log scale can."""
    edges = [float(edge) for axes in row for edge in axes.dataLim.intervaly]
    return [edge for edge in edges if 0 < edge < math.inf]


def _reach(num_crossings: int, native_len: int) -> str:
    first, last = native_len, native_len << num_crossings
    return f"{num_crossings}\n{first:,} \u2192 {last:,}"


def _longest_gap(row: CrossingRow) -> Estimate:
    """Return the median time at the last tier change, or of an ordinary step if there is none.

    It has no interval, because it is a median.
    """
    return Estimate(row.step_ms if row.crossing_ms is None else row.crossing_ms, None, None)


def _draw(
    axes: "Axes", rows: Sequence[CrossingRow], number: Callable[[CrossingRow], Estimate]
) -> None:
    for place, policy in enumerate(CROSSING_POLICIES):
        own = [each for each in rows if each.policy == policy]
        if not own:
            continue
        shift = (place - (len(CROSSING_POLICIES) - 1) / 2) * _APART
        found = [number(each) for each in own]
        axes.errorbar(
            [each.num_crossings + shift for each in own],
            [each.value for each in found],
            yerr=[
                [0.0 if each.low is None else max(0.0, each.value - each.low) for each in found],
                [0.0 if each.high is None else max(0.0, each.high - each.value) for each in found],
            ],
            fmt=_MARKERS[policy],
            color=_COLOURS[policy],
            capsize=3,
            label=policy,
        )
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
