"""The plot of what a table costs that is fixed for all lengths, within L and beyond."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from server.evaluation.plan import Variant
from server.evaluation.report import LengthReport, LengthRow
from server.study.intervals import Estimate, exponential, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "static.png"
_PINNED, _FIXED, _NONE = "#0072B2", "#E69F00", "#000000"  # Okabe and Ito's
_DARK = "#7a5200"  # of the fixed table's colour, for text
_ROOM = 1.22  # above the highest of the two scaled lines, for the values that lie beyond


def plot_static(report: LengthReport, folder: Path) -> None:
    """Write static.png if one method was measured under both policies, beside no scaling.

    The picture's numbers are in its field `Description`, as JSON.
    """
    found = _compared(report)
    if found is None:
        return
    from matplotlib.figure import Figure  # noqa: PLC0415  # optional, and slow to import

    none, fixed, pinned = (_values(report, each) for each in found)
    lens, native_len = report.plan.context_lens, report.plan.native_len
    factor = report.of(found[1])[0].factor
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    top = _ROOM * max(*fixed, *pinned)
    axes.set_ylim(0.9 * min(*none, *fixed, *pinned), top)
    name = found[1].method
    for values, colour, style, marker, label in (
        (none, _NONE, ":", "o", "no scaling"),
        (fixed, _FIXED, "--", "s", f"static {name}: factor {factor:g} for every request"),
        (pinned, _PINNED, "-", "D", f"ropewalk: for each request the {name} table that fits it"),
    ):
        axes.plot(
            lens, values, color=colour, linestyle=style, marker=marker, label=label,
            # Within L it is the line of the fitting table.
            zorder=3 if colour == _NONE else 2, markersize=4 if colour == _NONE else 7,
        )  # fmt: skip
    within = [at for at, each in enumerate(lens) if each <= native_len]
    if within:
        span = slice(within[0], within[-1] + 1)
        axes.fill_between(lens[span], pinned[span], fixed[span], color=_FIXED, alpha=0.15, lw=0)
        _tell_cost(axes, report, found, within[-1])
    _tell_values_beyond(axes, lens, none, top)
    _finish(axes, report)
    numbers = {"context_lens": lens, "none": none, "fixed": fixed, "pinned": pinned}
    figure.savefig(folder / FILE, dpi=150, metadata={"Description": json.dumps(numbers)})


def added_cost(fixed: LengthRow, pinned: LengthRow) -> Estimate:
    """Return the ratio of two perplexities over the same windows, compared window by window."""
    pairs = zip(fixed.windows, pinned.windows, strict=True)
    return exponential(mean([one.nats / one.target_tokens - two.nats / two.target_tokens
                             for one, two in pairs]))  # fmt: skip


def _compared(report: LengthReport) -> tuple[Variant, Variant, Variant] | None:
    """Return no scaling, and both policies of the method that is best at the longest length."""
    variants = report.plan.variants
    unscaled = [each for each in variants if each.policy is None]
    both = [
        (fixed, pinned)
        for fixed in variants
        for pinned in variants
        if fixed.method == pinned.method and (fixed.policy, pinned.policy) == ("fixed", "pinned")
    ]
    if not unscaled or not both or not report.rows[0].windows:
        return None
    return (unscaled[0], *min(both, key=lambda pair: _values(report, pair[1])[-1]))


def _values(report: LengthReport, variant: Variant) -> list[float]:
    rows = report.of(variant)
    return [math.nan if row.perplexity is None else row.perplexity.value for row in rows]


def _tell_cost(
    axes: "Axes", report: LengthReport, found: tuple[Variant, Variant, Variant], at: int
) -> None:
    """Write what the fixed table adds at the longest length within L."""
    fixed, pinned = report.of(found[1])[at], report.of(found[2])[at]
    ratio = added_cost(fixed, pinned)
    spread = ""
    if ratio.low is not None and ratio.high is not None:
        spread = f" (95 %: {100 * (ratio.low - 1):.0f} to {100 * (ratio.high - 1):.0f})"
    low, high = (_values(report, each)[at] for each in (found[2], found[1]))
    axes.annotate(
        f"{100 * (ratio.value - 1):+.0f} %{spread}",
        (fixed.context_len, math.sqrt(low * high)), xytext=(-6, 0), textcoords="offset points",
        ha="right", va="center", color=_DARK,
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


def _finish(axes: "Axes", report: LengthReport) -> None:
    lens, native_len = report.plan.context_lens, report.plan.native_len
    axes.set_xscale("log", base=2)
    axes.set_xticks(lens, [f"{each:,}" for each in lens])
    axes.minorticks_off()
    if lens[0] <= native_len <= lens[-1]:
        axes.axvline(native_len, color="0.6", linewidth=1, zorder=0)
        axes.annotate(
            "trained length", (native_len, 0), xycoords=("data", "axes fraction"),
            xytext=(4, 4), textcoords="offset points", fontsize="small", color="0.4",
        )  # fmt: skip
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("perplexity per token (lower is better)")
    axes.set_title(f"{report.model}, trained for {native_len} tokens", fontsize="medium")
    axes.grid(visible=True, color="0.92")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.figure.legend(loc="outside lower center", frameon=False, ncols=3)
