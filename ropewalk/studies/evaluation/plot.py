"""Plots of quality against context length: lines, a heat map, and what a fixed table costs."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.studies.evaluation.intervals import Estimate
from ropewalk.studies.evaluation.plan import FITTING, METHODS, PLACED, Variant
from ropewalk.studies.evaluation.report import (
    NUM_BINS,
    LengthReport,
    LengthRow,
    added_cost,
    targets_of,
)
from ropewalk.studies.harness.plotting import new_figure, percent_axis, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

# Okabe and Ito's colours, then Tol's, distinct for every kind of colour vision; lines also have
# markers.
_COLOURS = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#CC79A7", "#D55E00"),
    *("#882255", "#44AA99", "#999933", "#DDCC77"),
)
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "h", "*", "p", "<")
_STYLES = {None: ":", "fixed": "--", "grow": "-.", "by_position": "-"}
_COLUMNS = 4
_APART = 0.06  # of a doubling, between the markers of two variants at one length
_FITTING, _FIXED, _NONE = "#0072B2", "#E69F00", "#000000"  # of static.png
_DARK = "#7a5200"  # of the fixed table's colour, for text
_ROOM = 1.22  # above the highest of the two scaled lines, for the values that lie beyond


def plot(report: LengthReport, folder: Path) -> None:
    """Write perplexity.png, retrieval.png, depth.png and static.png.

    Each is written only if it has measurements.
    """
    heading = f"{report.model}, trained for {report.plan.native_len} tokens"
    first = report.rows[0]

    def lines(
        name: str, title: str, quantity: str, pick: Callable[[LengthRow], Estimate | None]
    ) -> None:
        _lines(report, folder / name, f"{heading}: {title}", quantity, pick)

    if first.windows:
        lines(
            "perplexity.png",
            f"perplexity against context length\n{targets_of(report)}",
            "perplexity per token (log scale)",
            lambda row: row.perplexity,
        )
        plot_static(report, folder / "static.png", heading)
    if first.queries:
        lines(
            "retrieval.png",
            f"retrieval against context length\n{len(first.queries)} questions at every length",
            "right answers",
            lambda row: row.retrieval,
        )
        _heat_map(report, folder / "depth.png", heading)


def _lines(
    report: LengthReport,
    path: Path,
    title: str,
    quantity: str,
    pick: Callable[[LengthRow], Estimate | None],
) -> None:
    """Draw one line per variant, with bars for its 95 % intervals if there are few lines.

    Variants stand beside each other at a length, so that equal ones are all seen, and the legend
    says which are equal everywhere.
    """
    lens, variants = report.plan.context_lens, report.plan.variants
    found = {variant: [pick(row) for row in report.of(variant)] for variant in variants}
    has_bars = len(variants) <= _COLUMNS
    with new_figure(path, 9, 5) as figure:
        axes = figure.subplots()
        for number, variant in enumerate(variants):
            aside = 2 ** (_APART * (number - (len(variants) - 1) / 2))
            points = [
                (length * aside, each)
                for length, each in zip(lens, found[variant], strict=False)
                if each is not None
            ]
            at = [*METHODS, *PLACED].index(variant.method)
            twin = next(each for each in variants if found[each] == found[variant])
            equal = "" if twin is variant else f"\n(equal to {twin.label})"
            axes.plot(
                [x for x, _ in points],
                [each.value for _, each in points],
                color=_COLOURS[at],
                marker=_MARKERS[at],
                linestyle=_STYLES[variant.policy],
                label=variant.label + equal,
                markersize=5,
                # Open and filled markers, because dashes are hard to see between two points.
                markerfacecolor="white" if variant.policy == "fixed" else _COLOURS[at],
            )
            bars = [(x, each.low, each.high) for x, each in points if each.low is not None]
            if bars and has_bars:
                axes.vlines(*zip(*bars, strict=True), color=_COLOURS[at], alpha=0.5, linewidth=1.2)
        if quantity.startswith("perplexity"):
            _log_numbers(axes)
        else:
            axes.set_ylim(-0.03, 1.03)
            percent_axis(axes.yaxis)
        # Above, because a line of 100 % would cross it inside of the panel.
        _finish(axes, report, quantity, is_above=True)
        axes.set_title(title, fontsize="medium", pad=18)
        figure.legend(
            loc="outside right upper", frameon=False,
            title="method, policy" + "\n(bars: 95 %)" * has_bars,
        )  # fmt: skip


def _log_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _finish(axes: "Axes", report: LengthReport, quantity: str, *, is_above: bool) -> None:
    """Draw lengths on a logarithmic axis, and mark the trained one, above the panel or in it."""
    lens, native_len = report.plan.context_lens, report.plan.native_len
    axes.set_xscale("log", base=2)
    axes.set_xticks(lens, [f"{each:,}" for each in lens])
    tidy(axes)
    if lens[0] <= native_len <= lens[-1]:
        axes.axvline(native_len, color="0.6", linewidth=1, zorder=0)
        axes.annotate(
            "trained length", (native_len, int(is_above)), xycoords=("data", "axes fraction"),
            xytext=(0, 2) if is_above else (4, 4), textcoords="offset points",
            va="bottom" if is_above else "baseline", ha="center" if is_above else "left",
            fontsize="small", color="0.4",
        )  # fmt: skip
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel(quantity)


def _heat_map(report: LengthReport, path: Path, heading: str) -> None:
    """Draw a panel per variant: right answers of questions, by needle depth and context length."""
    variants = report.plan.variants
    num_columns = min(_COLUMNS, len(variants))
    num_rows = -(-len(variants) // num_columns)
    with new_figure(path, 3.1 * num_columns + 1, 2.6 * num_rows + 0.8) as figure:
        panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        images = [
            _panel(panel, report, variant) for panel, variant in zip(panels, variants, strict=False)
        ]
        for panel in panels[len(variants) :]:
            panel.set_axis_off()
        bar = figure.colorbar(images[0], ax=panels.tolist(), shrink=0.7)
        percent_axis(bar.ax.yaxis)
        bar.set_label("right answers")
        figure.supxlabel("context length (tokens)")
        figure.supylabel("depth of the needle\n(0 %: the beginning)", fontsize="medium")
        figure.suptitle(
            f"{heading}: retrieval by depth and context length\na cell: right answers / questions",
            fontsize="medium",
        )


def _panel(panel: "Axes", report: LengthReport, variant: Variant) -> "AxesImage":
    rows = report.of(variant)
    by_depth = list(zip(*(row.depth_bins() for row in rows), strict=True))
    shares = [
        [each.num_right / each.num_queries if each.num_queries else math.nan for each in line]
        for line in by_depth
    ]
    image = panel.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for at_depth, line in enumerate(by_depth):
        for at_len, cell in enumerate(line):
            if cell.num_queries:
                panel.text(
                    at_len, at_depth, f"{cell.num_right}/{cell.num_queries}", ha="center",
                    va="center", fontsize=8,
                    color="white" if 2 * cell.num_right < cell.num_queries else "black",
                )  # fmt: skip
    panel.set_xticks(range(len(rows)), [f"{row.context_len:,}" for row in rows], fontsize=8)
    edges = [f"{100 * at // NUM_BINS}-{100 * (at + 1) // NUM_BINS} %" for at in range(NUM_BINS)]
    panel.set_yticks(range(NUM_BINS), edges, fontsize=8)
    panel.set_title(variant.label, fontsize="medium")
    return image


def plot_static(report: LengthReport, path: Path, heading: str) -> None:
    """Draw what a table costs that is fixed for all lengths, within L and beyond.

    It is drawn if one method was measured under both policies, beside no scaling. The picture's
    numbers are in its field `Description`, as JSON.
    """
    found = _compared(report)
    if found is None:
        return
    none, fixed, fitting = (_values(report, each) for each in found)
    lens, name = report.plan.context_lens, found[1].method
    factor = report.of(found[1])[0].factor
    numbers = {"context_lens": lens, "none": none, "fixed": fixed, "fitting": fitting}
    with new_figure(path, 9, 4.2, metadata={"Description": json.dumps(numbers)}) as figure:
        axes = figure.subplots()
        top = _ROOM * max(*fixed, *fitting)
        axes.set_ylim(0.9 * min(*none, *fixed, *fitting), top)
        for values, colour, style, marker, label in (
            (none, _NONE, ":", "o", "no scaling"),
            (fixed, _FIXED, "--", "s", f"static {name}: factor {factor:g} for every request"),
            (
                fitting,
                _FITTING,
                "-",
                "D",
                f"ropewalk: {name} by the length that is there",
            ),
        ):
            axes.plot(
                lens, values, color=colour, linestyle=style, marker=marker, label=label,
                # Within L it is the line of the fitting table.
                zorder=3 if colour == _NONE else 2, markersize=4 if colour == _NONE else 7,
            )  # fmt: skip
        within = sum(each <= report.plan.native_len for each in lens)
        if within:
            axes.fill_between(
                lens[:within], fitting[:within], fixed[:within], color=_FIXED, alpha=0.15, lw=0
            )
            longest = [report.of(each)[within - 1] for each in found]
            _tell_cost(axes, longest[1], longest[2], (fitting[within - 1], fixed[within - 1]))
        _tell_values_beyond(axes, lens, none, top)
        _finish(axes, report, "perplexity per token (lower is better)", is_above=False)
        axes.set_title(heading, fontsize="medium")
        figure.legend(loc="outside lower center", frameon=False, ncols=3)


def _compared(report: LengthReport) -> tuple[Variant, Variant, Variant] | None:
    """Return no scaling, and both policies of the method that is best at the longest length."""
    variants = report.plan.variants
    unscaled = [each for each in variants if each.policy is None]
    both = [
        (Variant(each.method, "fixed"), each)
        for each in variants
        if each.policy in FITTING and Variant(each.method, "fixed") in variants
    ]
    if not unscaled or not both:
        return None
    fitting = [each for each in both if each[1].policy == both[0][1].policy]
    return (unscaled[0], *min(fitting, key=lambda pair: _values(report, pair[1])[-1]))


def _values(report: LengthReport, variant: Variant) -> list[float]:
    rows = report.of(variant)
    return [math.nan if row.perplexity is None else row.perplexity.value for row in rows]


def _tell_cost(
    axes: "Axes", fixed: LengthRow, fitting: LengthRow, values: tuple[float, float]
) -> None:
    """Write what the fixed table adds at the longest length within L, between both values."""
    ratio = added_cost(fixed, fitting)
    spread = ""
    if ratio.low is not None and ratio.high is not None:
        spread = f" (95 %: {100 * (ratio.low - 1):.0f} to {100 * (ratio.high - 1):.0f})"
    axes.annotate(
        f"{100 * (ratio.value - 1):+.0f} %{spread}",
        (fixed.context_len, math.sqrt(math.prod(values))), xytext=(-6, 0),
        textcoords="offset points", ha="right", va="center", color=_DARK,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1},
    )  # fmt: skip


def _tell_values_beyond(
    axes: "Axes", lens: Sequence[int], values: Sequence[float], top: float
) -> None:
    """Write the values that lie above the panel at its upper edge."""
    for length, value in zip(lens, values, strict=True):
        if value > top:
            axes.annotate(
                f"{value:,.0f} \N{UPWARDS ARROW}", (length, 1), xycoords=("data", "axes fraction"),
                xytext=(0, -4), textcoords="offset points", ha="center", va="top", color=_NONE,
            )  # fmt: skip
