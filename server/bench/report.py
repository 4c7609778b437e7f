"""The results of a load as statistics, JSON and a table."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from server.bench.load import Failure, RequestRecord, Timing
from server.bench.plan import LoadPlan
from server.bench.target import Target


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a set of times, in seconds."""

    p50: float
    p95: float
    mean: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """One context length. Statistics are of answered requests without the warm-up, or None."""

    context_len: int  # tokens, as requested
    num_sent: int  # warm-up included, as in num_failed and failures
    num_failed: int
    failures: dict[str, int]
    num_measured: int
    prompt_tokens: float | None  # median, as the server counted
    completion_tokens: int  # of all measured requests
    cached_tokens: int  # of their prompts; more than 0 shortens the time to first token
    time_to_first_token_s: Spread | None
    inter_token_s: Spread | None
    end_to_end_s: Spread | None
    prefill_tokens_per_s: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a whole run."""

    target: Target
    plan: LoadPlan
    prompt_kind: str
    started_at: str  # ISO 8601, UTC
    records: tuple[RequestRecord, ...]
    num_drafted: int | None  # tokens that the server took from drafts meanwhile; None: unknown

    @property
    def num_failed(self) -> int:
        """Return the number of failed requests, including the warm-up."""
        return sum(isinstance(record.outcome, Failure) for record in self.records)

    def of_length(self, context_len: int) -> list[RequestRecord]:
        return [each for each in self.records if each.group.context_len == context_len]

    def summaries(self) -> list[LengthSummary]:
        return [summarise(each, self.of_length(each)) for each in self.plan.context_lens]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return a percentile with linear interpolation between the two nearest values.

    numpy does the same by default.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread | None:
    """Return the distribution of values, or None without values."""
    if not values:
        return None
    return Spread(
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        mean=sum(values) / len(values),
        min=min(values),
        max=max(values),
    )


def summarise(context_len: int, records: Sequence[RequestRecord]) -> LengthSummary:
    """Compute one length's statistics; gaps between tokens are pooled over all requests."""
    failures = [each.outcome for each in records if isinstance(each.outcome, Failure)]
    timings = [
        each.outcome
        for each in records
        if isinstance(each.outcome, Timing) and not each.group.is_warmup
    ]
    prefill, output = _tokens_per_s(records)
    prompt_lens = [each.prompt_tokens for each in timings]
    return LengthSummary(
        context_len=context_len,
        num_sent=len(records),
        num_failed=len(failures),
        failures=dict(Counter(each.kind for each in failures)),
        num_measured=len(timings),
        prompt_tokens=percentile(prompt_lens, 50) if prompt_lens else None,
        completion_tokens=sum(each.completion_tokens for each in timings),
        cached_tokens=sum(each.cached_tokens or 0 for each in timings),
        time_to_first_token_s=spread([each.time_to_first_token_s for each in timings]),
        inter_token_s=spread([gap for each in timings for gap in each.inter_token_s]),
        end_to_end_s=spread([each.end_to_end_s for each in timings]),
        prefill_tokens_per_s=prefill,
        output_tokens_per_s=output,
    )


def _tokens_per_s(records: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    """Return (prefill, output) over groups in which every request was answered.

    A group's prefill lasts until the last of its first tokens, its output until its last end.
    """
    num_prompt = num_output = 0
    prefill_s = whole_s = 0.0
    for group, members in groupby(records, key=lambda each: each.group):
        outcomes = [each.outcome for each in members]
        timings = [each for each in outcomes if isinstance(each, Timing)]
        if group.is_warmup or len(timings) < len(outcomes):
            continue
        num_prompt += sum(each.prompt_tokens for each in timings)
        num_output += sum(each.completion_tokens for each in timings)
        prefill_s += max(each.time_to_first_token_s for each in timings)
        whole_s += max(each.end_to_end_s for each in timings)
    if not num_prompt:
        return None, None
    return num_prompt / prefill_s, num_output / whole_s


def as_json(report: Report) -> dict[str, Any]:
    """Return the document of --json; its fields are described in docs/bench.md."""
    return {
        "url": report.target.url,
        "model": report.target.model,
        "max_model_len": report.target.max_model_len,
        "started_at": report.started_at,
        "settings": dataclasses.asdict(report.plan) | {"prompt_kind": report.prompt_kind},
        "num_failed": report.num_failed,
        "accepted_draft_tokens": report.num_drafted,
        "results": [
            {
                **dataclasses.asdict(summary),
                "requests": [_request(each) for each in report.of_length(summary.context_len)],
            }
            for summary in report.summaries()
        ],
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    timing = record.outcome if isinstance(record.outcome, Timing) else None
    failure = record.outcome if isinstance(record.outcome, Failure) else None
    return {
        "round": record.group.round,
        "is_warmup": record.group.is_warmup,
        "started_s": record.started_s,
        "prompt_tokens": timing and timing.prompt_tokens,
        "completion_tokens": timing and timing.completion_tokens,
        "cached_tokens": timing and timing.cached_tokens,
        "time_to_first_token_s": timing and timing.time_to_first_token_s,
        "inter_token_s": timing and timing.inter_token_s,
        "end_to_end_s": timing and timing.end_to_end_s,
        "failure": failure and dataclasses.asdict(failure),
    }


_HEAD = (
    ("context", "prompt", "", "", "TTFT", "TTFT", "ITL", "ITL", "E2E", "E2E", "prefill", "output"),
    ("tokens", "tokens", "measured", "failed", "p50 ms", "p95 ms", "p50 ms", "p95 ms", "p50 ms",
     "p95 ms", "tokens/s", "tokens/s"),
)  # fmt: skip


def table(report: Report) -> str:
    """Return two heading lines and a line per context length; a dash is a missing number."""
    rows = [*_HEAD, *(_row(each) for each in report.summaries())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_remarks(report)])


def _row(summary: LengthSummary) -> tuple[str, ...]:
    spreads = (summary.time_to_first_token_s, summary.inter_token_s, summary.end_to_end_s)
    times_s = [
        value for each in spreads for value in ((each.p50, each.p95) if each else (None, None))
    ]
    return (
        str(summary.context_len),
        _number(summary.prompt_tokens, 0),
        str(summary.num_measured),
        str(summary.num_failed),
        *(_number(each and 1000 * each, 2) for each in times_s),
        _number(summary.prefill_tokens_per_s, 1),
        _number(summary.output_tokens_per_s, 1),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _remarks(report: Report) -> list[str]:
    """Return remarks on the numbers: failures by kind, prompts from the cache, and drafts."""
    found = []
    failures = [each.outcome for each in report.records if isinstance(each.outcome, Failure)]
    for kind, count in Counter(each.kind for each in failures).most_common():
        first = next(each.message for each in failures if each.kind == kind)
        found.append(f"failed: {count} x {kind}: {' '.join(first.split())}")
    cached = sum(each.cached_tokens for each in report.summaries())
    if cached:
        found.append(f"{cached} prompt tokens came from the server's prefix cache")
    if report.num_drafted:
        found.append(
            f"{report.num_drafted} tokens came from drafts: one step then gives several tokens at "
            "once, so ITL has gaps of almost 0 beside the time of whole steps"
        )
    return found
