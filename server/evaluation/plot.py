"""Plots of quality against context length: two line plots and a heat map."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from server.evaluation.plan import METHODS, PLACED, Variant
from server.evaluation.report import NUM_BINS, LengthReport, LengthRow
from server.evaluation.tasks.score import metric_names
from server.study.intervals import Estimate

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
_STYLES = {None: ":", "fixed": "--", "pinned": "-"}
_COLUMNS = 4
_APART = 0.06  # of a doubling, between the markers of two variants at one length


def plot(report: LengthReport, folder: Path) -> None:
    """Write perplexity.png, retrieval.png, depth.png, tasks.png, each if it has measurements."""
    lens = f"trained for {report.plan.native_len} tokens"
    first = report.rows[0]
    if first.windows:
        _lines(
            report,
            folder / "perplexity.png",
            f"{report.model}, {lens}: perplexity against context length\n"
            f"the same {first.target_tokens} target tokens at every length",
            "perplexity per token (log scale)",
            lambda row: row.perplexity,
        )
    if first.queries:
        _lines(
            report,
            folder / "retrieval.png",
            f"{report.model}, {lens}: retrieval against context length\n"
            f"{len(first.queries)} questions at every length",
            "right answers",
            lambda row: row.retrieval,
        )
        _heat_map(report, folder / "depth.png", lens)
    if report.plan.tasks:
        tasks = report.plan.tasks
        named = tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} RULER tasks"
        _lines(
            report,
            folder / "tasks.png",
            f"{report.model}, {lens}: {named} against context length\n"
            f"{report.plan.num_samples} samples of each task at every length",
            f"score ({metric_names(tasks)})",
            lambda row: row.mean_score,
        )


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
    from matplotlib.figure import Figure  # noqa: PLC0415  # optional, and slow to import

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    lens = report.plan.context_lens
    variants = report.plan.variants
    found = {variant: [pick(row) for row in report.of(variant)] for variant in variants}
    for number, variant in enumerate(variants):
        aside = 2 ** (_APART * (number - (len(variants) - 1) / 2))
        points = [
            (length * aside, each)
            for length, each in zip(lens, found[variant], strict=False)
            if each is not None
        ]
        at = [*METHODS, *PLACED].index(variant.method)
        twin = next(each for each in variants if found[each] == found[variant])
        axes.plot(
            [x for x, _ in points],
            [each.value for _, each in points],
            color=_COLOURS[at],
            marker=_MARKERS[at],
            linestyle=_STYLES[variant.policy],
            label=variant.label if twin is variant else f"{variant.label}\n(equal to {twin.label})",
            markersize=5,
            # Open and filled markers, because dashes are hard to see between two points.
            markerfacecolor="white" if variant.policy == "fixed" else _COLOURS[at],
        )
        bars = [(x, each.low, each.high) for x, each in points if each.low is not None]
        if bars and len(variants) <= _COLUMNS:
            x, low, high = zip(*bars, strict=True)
            axes.vlines(x, low, high, color=_COLOURS[at], alpha=0.5, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lens, [f"{each:,}" for each in lens])
    if quantity.startswith("perplexity"):
        _log_numbers(axes)
    else:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.minorticks_off()
    if lens[0] <= report.plan.native_len <= lens[-1]:
        axes.axvline(report.plan.native_len, color="0.6", linewidth=1)
        axes.annotate(
            "trained length", (report.plan.native_len, 1), xycoords=("data", "axes fraction"),
            xytext=(0, 2), textcoords="offset points", va="bottom", ha="center", fontsize="small",
            color="0.4",
        )  # fmt: skip
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel(quantity)
    # The pad is for "trained length", which a line of 100 % would cross inside of the panel.
    axes.set_title(title, fontsize="medium", pad=18)
    axes.grid(visible=True, color="0.92")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    has_bars = len(variants) <= _COLUMNS
    heading = "method, policy" + "\n(bars: 95 %)" * has_bars
    figure.legend(loc="outside right upper", frameon=False, title=heading)
    figure.savefig(path, dpi=150)


def _log_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _heat_map(report: LengthReport, path: Path, lens: str) -> None:
    """Draw a panel per variant: right answers of questions, by needle depth and context length."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    variants = report.plan.variants
    num_columns = min(_COLUMNS, len(variants))
    num_rows = -(-len(variants) // num_columns)
    figure = Figure(figsize=(3.1 * num_columns + 1, 2.6 * num_rows + 0.8), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    images = [
        _panel(panel, report, variant) for panel, variant in zip(panels, variants, strict=False)
    ]
    for panel in panels[len(variants) :]:
        panel.set_axis_off()
    bar = figure.colorbar(images[0], ax=panels.tolist(), shrink=0.7)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    bar.set_label("right answers")
    figure.supxlabel("context length (tokens)")
    figure.supylabel("depth of the needle\n(0 %: the beginning)", fontsize="medium")
    figure.suptitle(
        f"{report.model}, {lens}: retrieval by depth and context length\n"
        "a cell: right answers / questions",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _panel(panel: "Axes", report: LengthReport, variant: Variant) -> "AxesImage":
    rows = report.of(variant)
    by_depth = list(zip(*(row.depth_bins() for row in rows), strict=True))
    shares = [
        [each.num_right / each.num_queries if each.num_queries else float("nan") for each in line]
        for line in by_depth
    ]
    image = panel.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for at_depth, line in enumerate(by_depth):
        for at_len, cell in enumerate(line):
            if cell.num_queries:
                colour = "white" if 2 * cell.num_right < cell.num_queries else "black"
                text = f"{cell.num_right}/{cell.num_queries}"
                panel.text(
                    at_len, at_depth, text, ha="center", va="center", color=colour, fontsize=8
                )
    panel.set_xticks(range(len(rows)), [f"{row.context_len:,}" for row in rows], fontsize=8)
    edges = [f"{100 * at // NUM_BINS}-{100 * (at + 1) // NUM_BINS} %" for at in range(NUM_BINS)]
    panel.set_yticks(range(NUM_BINS), edges, fontsize=8)
    panel.set_title(variant.label, fontsize="medium")
    return image
