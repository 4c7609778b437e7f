"""The results of a load as statistics, JSON and a table."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ropewalk.studies.bench.load import Failure, RequestRecord, Timing
from ropewalk.studies.bench.plan import LoadPlan
from ropewalk.studies.bench.target import Target
from ropewalk.studies.harness.text_table import aligned, number


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
    def failures(self) -> list[Failure]:
        """Return the failures, including the warm-up's."""
        return [each.outcome for each in self.records if isinstance(each.outcome, Failure)]

    def of_length(self, context_len: int) -> list[RequestRecord]:
        return [each for each in self.records if each.group.context_len == context_len]

    def summaries(self) -> list[dict[str, Any]]:
        """Return one summary per length, shortest first."""
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


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return the distribution of times, in seconds, or None without values."""
    if not values:
        return None
    percentiles = {f"p{each}": percentile(values, each) for each in (50, 95)}
    return {
        **percentiles, "mean": sum(values) / len(values), "min": min(values), "max": max(values),
    }  # fmt: skip


def summarise(context_len: int, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return one length's statistics under the names of docs/guide/bench.md.

    Those of times are of answered requests without the warm-up, or None. Gaps between tokens are
    pooled over all requests.
    """
    failures = [each.outcome.kind for each in records if isinstance(each.outcome, Failure)]
    timings = [
        each.outcome
        for each in records
        if isinstance(each.outcome, Timing) and not each.group.is_warmup
    ]
    prefill, output = _tokens_per_s(records)
    return {
        "context_len": context_len,
        "num_sent": len(records),
        "num_failed": len(failures),
        "failures": dict(Counter(failures)),
        "num_measured": len(timings),
        "prompt_tokens": percentile([each.prompt_tokens for each in timings], 50)
        if timings
        else None,
        "completion_tokens": sum(each.completion_tokens for each in timings),
        "cached_tokens": sum(each.cached_tokens or 0 for each in timings),
        "time_to_first_token_s": spread([each.time_to_first_token_s for each in timings]),
        "inter_token_s": spread([gap for each in timings for gap in each.inter_token_s]),
        "end_to_end_s": spread([each.end_to_end_s for each in timings]),
        "prefill_tokens_per_s": prefill,
        "output_tokens_per_s": output,
    }


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
    """Return the document of --json; its fields are described in docs/guide/bench.md."""
    return {
        "url": report.target.url,
        "model": report.target.model,
        "max_model_len": report.target.max_model_len,
        "started_at": report.started_at,
        "settings": dataclasses.asdict(report.plan) | {"prompt_kind": report.prompt_kind},
        "num_failed": len(report.failures),
        "accepted_draft_tokens": report.num_drafted,
        "results": [
            summary
            | {"requests": [_request(each) for each in report.of_length(summary["context_len"])]}
            for summary in report.summaries()
        ],
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    timing = record.outcome if isinstance(record.outcome, Timing) else None
    failure = record.outcome if isinstance(record.outcome, Failure) else None
    times = ("time_to_first_token_s", "inter_token_s", "end_to_end_s")
    tokens = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {
        "round": record.group.round,
        "is_warmup": record.group.is_warmup,
        "started_s": record.started_s,
        **{name: timing and getattr(timing, name) for name in (*tokens, *times)},
        "failure": failure and dataclasses.asdict(failure),
    }


_TIMES = {"TTFT": "time_to_first_token_s", "ITL": "inter_token_s", "E2E": "end_to_end_s"}
_PERCENTS = ("p50", "p95")


def table(report: Report) -> str:
    """Return two heading lines and a line per context length; a dash is a missing number."""
    times = [(short, percent) for short in _TIMES for percent in _PERCENTS]
    rows = [
        ["context", "prompt", "", "", *(short for short, _ in times), "prefill", "output"],
        [
            *("tokens", "tokens", "measured", "failed"),
            *(f"{percent} ms" for _, percent in times),
            *("tokens/s", "tokens/s"),
        ],
        *map(_cells, report.summaries()),
    ]
    return "\n".join([*aligned(rows), *_remarks(report)])


def _cells(summary: dict[str, Any]) -> list[str]:
    times = [
        summary[name] and 1000 * summary[name][percent]
        for name in _TIMES.values()
        for percent in _PERCENTS
    ]
    return [
        str(summary["context_len"]),
        number(summary["prompt_tokens"], ".0f"),
        str(summary["num_measured"]),
        str(summary["num_failed"]),
        *(number(each, ".2f") for each in times),
        number(summary["prefill_tokens_per_s"], ".1f"),
        number(summary["output_tokens_per_s"], ".1f"),
    ]


def _remarks(report: Report) -> list[str]:
    """Return remarks on the numbers: failures by kind, prompts from the cache, and drafts."""
    found = []
    for kind, count in Counter(each.kind for each in report.failures).most_common():
        first = next(each.message for each in report.failures if each.kind == kind)
        found.append(f"failed: {count} x {kind}: {' '.join(first.split())}")
    cached = sum(each["cached_tokens"] for each in report.summaries())
    if cached:
        found.append(f"{cached} prompt tokens came from the server's prefix cache")
    if report.num_drafted:
        found.append(
            f"{report.num_drafted} tokens came from drafts: one step then gives several tokens at "
            "once, so ITL has gaps of almost 0 beside the time of whole steps"
        )
    return found
