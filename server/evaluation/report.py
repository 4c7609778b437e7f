"""Statistics of scores, as JSON and CSV."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from server.evaluation.cells import PERPLEXITY, RETRIEVAL, QueryScore, Score, WindowScore
from server.evaluation.plan import LengthPlan, Variant
from server.evaluation.tasks.sample import Sample, SampleScore
from server.study.eval_run import csv_text
from server.study.intervals import Estimate, exponential, mean, proportion

NUM_BINS = 4  # of depth
PASS_SHARE = 0.85  # of the score at L, at the effective length
_LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class DepthBin:
    """Questions about needles at similar depths."""

    low: float  # inclusive, 0 to 1
    high: float  # exclusive except for the last
    num_right: int
    num_queries: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A sample of a task and its score."""

    sample: Sample
    score: SampleScore


@dataclass(frozen=True, slots=True)
class LengthRow:
    """The numbers of one variant at one length; None if not measured."""

    variant: Variant
    context_len: int  # tokens
    factor: float  # of the table in force
    perplexity: Estimate | None  # per token of the targets
    bits_per_byte: Estimate | None
    windows: tuple[WindowScore, ...]
    retrieval: Estimate | None  # share of right answers
    queries: tuple[QueryScore, ...]
    answered: Mapping[str, tuple[Answered, ...]]  # by task

    @property
    def target_tokens(self) -> int:
        return sum(each.target_tokens for each in self.windows)

    @property
    def target_bytes(self) -> int:
        """Return the bytes of the targets' text, in UTF-8."""
        return sum(each.target_bytes for each in self.windows)

    @property
    def num_right(self) -> int:
        return sum(each.is_right for each in self.queries)

    def task_score(self, task: str) -> Estimate | None:
        """Return RULER's score of a task, 0 to 1: the mean share over its samples."""
        return _mean_share(self.answered.get(task, ()))

    @property
    def mean_score(self) -> Estimate | None:
        """Return the mean over tasks, which have equally many samples."""
        return _mean_share([each for answered in self.answered.values() for each in answered])

    def depth_bins(self) -> list[DepthBin]:
        """Return equal bins of depth, from the beginning of the text to its end."""
        bins = []
        for number in range(NUM_BINS):
            inside = [
                each
                for each in self.queries
                if min(int(each.depth * NUM_BINS), NUM_BINS - 1) == number
            ]
            num_right = sum(each.is_right for each in inside)
            bins.append(
                DepthBin(number / NUM_BINS, (number + 1) / NUM_BINS, num_right, len(inside))
            )
        return bins


@dataclass(frozen=True, slots=True)
class LengthReport:
    """The results of a whole run."""

    model: str
    model_digest: str
    dtype: str
    device: str
    text: str  # a description of the text
    text_tokens: int
    started_at: str  # ISO 8601, UTC
    plan: LengthPlan
    rows: tuple[LengthRow, ...]  # by variant, then length

    def of(self, variant: Variant) -> list[LengthRow]:
        """Return a variant's rows, shortest context first."""
        return [row for row in self.rows if row.variant == variant]

    def score_at_native_len(self, variant: Variant) -> float | None:
        """Return the mean score at L that lengths are compared with, or None if not measured.

        It is that of the untouched table if this was measured, otherwise the variant's own.
        """
        untouched = next((each for each in self.plan.variants if each.policy is None), variant)
        for row in self.of(untouched):
            if row.context_len == self.plan.native_len and row.mean_score is not None:
                return row.mean_score.value
        return None

    def effective_len(self, variant: Variant) -> int | None:
        """Return the longest length with at least PASS_SHARE of the score at L, or None."""
        base = self.score_at_native_len(variant)
        passed = [
            row.context_len
            for row in self.of(variant)
            if base and row.mean_score is not None and row.mean_score.value >= PASS_SHARE * base
        ]
        return max(passed, default=None)


def make_row(
    variant: Variant,
    context_len: int,
    factor: float,
    scores: Mapping[str, list[Score]],
    answered: Mapping[str, tuple[Answered, ...]],
) -> LengthRow:
    """Compute statistics over the scores of each kind."""
    windows = tuple(each for each in scores.get(PERPLEXITY, []) if isinstance(each, WindowScore))
    queries = tuple(each for each in scores.get(RETRIEVAL, []) if isinstance(each, QueryScore))
    return LengthRow(
        variant,
        context_len,
        factor,
        exponential(mean([each.nats / each.target_tokens for each in windows]))
        if windows
        else None,
        _bits_per_byte(windows) if windows else None,
        windows,
        proportion(sum(each.is_right for each in queries), len(queries)) if queries else None,
        queries,
        answered,
    )


def _mean_share(answered: Sequence[Answered]) -> Estimate | None:
    """Return the mean share, with Wilson's interval: shares spread less than right and wrong."""
    if not answered:
        return None
    return proportion(math.fsum(each.score.share for each in answered), len(answered))


def _bits_per_byte(windows: tuple[WindowScore, ...]) -> Estimate:
    """Return all bits over all bytes; the interval is a ratio's, of each window's residual."""
    num_bytes = sum(each.target_bytes for each in windows)
    ratio = sum(each.nats for each in windows) / _LN_2 / num_bytes
    residuals = [each.nats / _LN_2 - ratio * each.target_bytes for each in windows]
    spread = mean(residuals)
    if spread.high is None:
        return Estimate(ratio, None, None)
    reach = (spread.high - spread.value) * len(windows) / num_bytes
    return Estimate(ratio, ratio - reach, ratio + reach)


def as_json(report: LengthReport) -> dict[str, Any]:
    """Return results.json; its fields are described in docs/evaluation.md."""
    plan = report.plan
    return {
        "model": report.model,
        "model_digest": report.model_digest,
        "dtype": report.dtype,
        "device": report.device,
        "native_len": plan.native_len,
        "text": report.text,
        "text_tokens": report.text_tokens,
        "started_at": report.started_at,
        "settings": {
            "context_lens": plan.context_lens,
            "variants": [each.label for each in plan.variants],
            "windows": plan.num_windows,
            "target_tokens": plan.target_tokens,
            "queries": plan.num_queries,
            "forms": [form.name for form in plan.forms],
            "depths": plan.depths,
            "seed": plan.seed,
            "tasks": plan.tasks,
            "samples": plan.num_samples,
        },
        "effective_lens": {
            each.label: report.effective_len(each) for each in plan.variants if plan.tasks
        },
        "results": [
            {
                **scalars(row),
                "depth_bins": [asdict(each) for each in row.depth_bins() if each.num_queries],
                "windows": [asdict(each) for each in row.windows],
                "queries": [asdict(each) for each in row.queries],
            }
            for row in report.rows
        ],
    }


def scalars(row: LengthRow) -> dict[str, Any]:
    """Return a row's numbers by name, for a line of results.csv or an entry of results.json."""
    found: dict[str, Any] = {
        "method": row.variant.method,
        "policy": row.variant.policy,
        "context_len": row.context_len,
        "factor": row.factor,
    }
    for name, estimate in (
        ("perplexity", row.perplexity),
        ("bits_per_byte", row.bits_per_byte),
        ("retrieval", row.retrieval),
    ):
        found[name] = estimate and estimate.value
        found[f"{name}_low"] = estimate and estimate.low
        found[f"{name}_high"] = estimate and estimate.high
    for task in row.answered:
        found |= _percents(f"score_{task}", row.task_score(task))
    if row.answered:
        found |= _percents("score", row.mean_score)
    return found | {
        "num_windows": len(row.windows),
        "target_tokens": row.target_tokens,
        "target_bytes": row.target_bytes,
        "num_right": row.num_right,
        "num_queries": len(row.queries),
    }


def _percents(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return a score and its bounds, in percent as RULER has them."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    low, high = ((None if each is None else 100 * each) for each in (estimate.low, estimate.high))
    return {name: 100 * estimate.value, f"{name}_low": low, f"{name}_high": high}


def as_csv(report: LengthReport) -> str:
    """Return results.csv: a heading and a line per variant and length.

    A field is empty if it is null in JSON.
    """
    return csv_text([scalars(row) for row in report.rows])
