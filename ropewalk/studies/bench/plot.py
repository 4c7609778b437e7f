"""Plots of latency against context length."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.studies.bench.report import Report
from ropewalk.studies.harness.plotting import (
    COLOURS,
    label_logarithmic,
    length_ticks,
    milliseconds_text,
    new_figure,
    tidy,
    use_log_scale,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(report: Report, path: Path) -> None:
    """Draw two panels over one axis of context length. Lengths without an answer have no point.

    At least one must have a point.
    """
    measured = [each for each in report.summaries() if each["num_measured"]]
    assert measured
    plan = report.plan
    title = (
        f"{report.target.model}: latency against context length\n"
        f"{plan.num_requests} requests a length, {plan.concurrency} in flight, "
        f"{plan.output_tokens} output tokens, {report.started_at[:10]}"
    )
    with new_figure(path, 8, 7, title) as figure:
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

        first, between = figure.subplots(2, 1, sharex=True)
        times = _draw(first, measured, "time_to_first_token_s")
        gaps = _draw(between, measured, "inter_token_s")
        use_log_scale([first], times, milliseconds_text)
        first.set_ylabel("time to first token (log scale)")
        first.legend(frameon=False, loc="upper left")
        between.set_ylabel("inter-token latency (linear scale)")
        if report.num_drafted:
            between.set_title(
                "tokens of one draft arrive together, with gaps of almost 0", fontsize=9
            )
        between.yaxis.set_major_locator(MaxNLocator(nbins=7, min_n_ticks=4))
        between.yaxis.set_major_formatter(lambda value, _: milliseconds_text(value))
        if gaps:
            between.set_ylim(0, 1.1 * max(gaps))
        else:
            between.set_yticks([])
            between.annotate(
                "no answer has a second token", (0.5, 0.5), xycoords="axes fraction", ha="center",
                color="0.4",
            )  # fmt: skip
        between.set_xlabel("context length (tokens in the prompt, log scale)")
        figure.align_ylabels()


def _draw(axes: "Axes", measured: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Draw p50 and p95 of one quantity, in milliseconds; return all of them."""
    rows = [each for each in measured if each[name]]  # one token each has no gaps
    p50, p95 = ([1000 * each[name][percent] for each in rows] for percent in ("p50", "p95"))
    lens = [_len_of(each) for each in rows]
    axes.fill_between(lens, p50, p95, color=COLOURS[0], alpha=0.12, linewidth=0)
    axes.plot(lens, p95, "s--", color=COLOURS[1], label="p95", markersize=5)
    axes.plot(lens, p50, "o-", color=COLOURS[0], label="p50", markersize=5)
    axes.set_xscale("log", base=2)
    ticks = length_ticks([_len_of(each) for each in measured])
    label_logarithmic(axes.xaxis, ticks, [f"{tick:,.0f}" for tick in ticks])
    tidy(axes)
    return [*p50, *p95]


def _len_of(summary: dict[str, Any]) -> float:
    """Return the tokens of the prompts, as counted by the server."""
    return float(summary["prompt_tokens"] or summary["context_len"])
