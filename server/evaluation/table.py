"""The report as text, with a block per quantity, a line per variant and a column per length.

A cell has the number and its 95 % interval.
"""

from collections.abc import Callable
from functools import partial

from server.evaluation.report import PASS_SHARE, LengthReport, LengthRow
from server.evaluation.tasks.score import metric_names
from server.study.intervals import Estimate

_Pick = Callable[[LengthRow], Estimate | None]


def table(report: LengthReport) -> str:
    """Return all measurements, with a blank line between the blocks."""
    plan = report.plan
    first = report.rows[0]
    blocks = [
        f"{report.model}, {report.dtype} on {report.device}, trained for {plan.native_len} tokens; "
        f"text: {report.text}"
    ]
    if first.windows:
        what = (
            f"{len(first.windows)} windows of {plan.target_tokens} tokens, the same at every "
            f"length: {first.target_tokens} tokens, {first.target_bytes} bytes"
        )
        blocks += [
            _block(report, f"perplexity per token ({what})", lambda row: row.perplexity, _plain),
            _block(report, "bits per byte (of the same)", lambda row: row.bits_per_byte, _plain),
        ]
    if first.queries:
        what = f"right of {len(first.queries)} questions a length"
        blocks.append(_block(report, f"retrieval, % ({what})", lambda row: row.retrieval, _percent))
    if plan.tasks:
        blocks += _task_blocks(report)
    return "\n\n".join(blocks)


def _task_blocks(report: LengthReport) -> list[str]:
    """Return a block per task, their mean, and the effective lengths with their rule."""
    plan = report.plan
    samples = f"in %, {plan.num_samples} samples a length"
    blocks = [
        _block(
            report,
            f"{task} ({metric_names([task])} {samples})",
            partial(LengthRow.task_score, task=task),
            _percent,
        )
        for task in plan.tasks
    ]
    if len(plan.tasks) > 1:
        title = f"mean of {len(plan.tasks)} tasks, %"
        blocks.append(_block(report, title, lambda row: row.mean_score, _percent))
    lines = [
        "effective length: the longest one with a mean score of at least "
        f"{100 * PASS_SHARE:.0f} % of the score at {plan.native_len} tokens"
    ]
    width = max(len(variant.label) for variant in plan.variants)
    for variant in plan.variants:
        base = report.score_at_native_len(variant)
        length = report.effective_len(variant)
        if base is None:
            text = f"- (--context-lens has no {plan.native_len})"
        elif not base:
            text = f"none (the score at {plan.native_len} tokens is 0)"
        else:
            found = "none" if length is None else f"{length} tokens"
            text = f"{found} (at least {100 * PASS_SHARE * base:.1f} %)"
        lines.append(f"{variant.label.ljust(width)}  {text}")
    return [*blocks, "\n".join(lines)]


def estimate_text(estimate: Estimate | None, number: Callable[[float], str]) -> str:
    """Format an estimate as `4.21 [3.90, 4.55]`, or as a dash if it was not measured."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def _plain(value: float) -> str:
    return f"{value:.3g}" if value >= 100 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _block(report: LengthReport, title: str, pick: _Pick, number: Callable[[float], str]) -> str:
    lens = report.plan.context_lens
    rows = [["", *(f"{each} tokens" for each in lens)]]
    for variant in report.plan.variants:
        cells = [estimate_text(pick(row), number) for row in report.of(variant)]
        rows.append([variant.label, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([title, *lines])
