"""Plots of latency against context length."""

from pathlib import Path
from typing import TYPE_CHECKING

from server.bench.report import LengthSummary, Report, Spread
from server.plotting import COLOURS, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(report: Report, path: Path) -> None:
    """Draw two panels over one axis of context length. Lengths without an answer have no point.

    At least one must have a point.
    """
    measured = [each for each in report.summaries() if each.num_measured]
    assert measured
    # Optional, and slow to import.
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    figure = Figure(figsize=(8, 7), layout="constrained")
    first, between = figure.subplots(2, 1, sharex=True)
    _draw(first, measured, [each.time_to_first_token_s for each in measured])
    _draw(between, measured, [each.inter_token_s for each in measured])
    first.set_yscale("log")
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    first.minorticks_off()
    first.set_ylabel("time to first token (ms)")
    first.legend(frameon=False, loc="upper left")
    between.set_ylabel("inter-token latency (ms)")
    between.set_ylim(bottom=0)
    between.set_xlabel("context length (tokens in the prompt)")
    figure.align_ylabels()
    plan = report.plan
    figure.suptitle(
        f"{report.target.model}: latency against context length\n"
        f"{plan.num_requests} requests a length, {plan.concurrency} in flight, "
        f"{plan.output_tokens} output tokens, {report.started_at[:10]}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _draw(axes: "Axes", measured: list[LengthSummary], spreads: list[Spread | None]) -> None:
    """Draw p50 and p95 of one quantity, in milliseconds."""
    points = [
        (_len_of(summary), 1000 * each.p50, 1000 * each.p95)
        for summary, each in zip(measured, spreads, strict=True)
        if each is not None  # None: one token each, so no gaps
    ]
    lens = [point[0] for point in points]
    p50, p95 = [point[1] for point in points], [point[2] for point in points]
    axes.fill_between(lens, p50, p95, color=COLOURS[0], alpha=0.12, linewidth=0)
    axes.plot(lens, p95, "s--", color=COLOURS[1], label="p95", markersize=5)
    axes.plot(lens, p50, "o-", color=COLOURS[0], label="p50", markersize=5)
    axes.set_xscale("log", base=2)
    ticks = [_len_of(each) for each in measured]
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    tidy(axes)


def _len_of(summary: LengthSummary) -> float:
    """Return the tokens of the prompts, as counted by the server."""
    return summary.prompt_tokens or summary.context_len
