"""The numbers of a run by variant and length: results.json, results.csv and the table.

The table has a block per quantity, a line per variant and a column per length.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.attention.quantised.page_format import EXACT
from ropewalk.studies.evaluation.cells import PERPLEXITY, RETRIEVAL, QueryScore, Score, WindowScore
from ropewalk.studies.evaluation.intervals import Estimate, exponential, mean, proportion
from ropewalk.studies.evaluation.plan import UNSCALED, LengthPlan, Variant
from ropewalk.studies.evaluation.record import write_files
from ropewalk.studies.harness.text_table import aligned

Form = Callable[[float], str]  # of a number in the table
NUM_BINS = 4  # of depth
_LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class DepthBin:
    """Questions about needles at similar depths."""

    low: float  # inclusive, 0 to 1
    high: float  # exclusive except for the last
    num_right: int
    num_queries: int


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One variant at one length, with statistics of its scores; None if not measured."""

    variant: Variant
    context_len: int  # tokens
    factor: float  # of the table in force
    scores: Mapping[str, Sequence[Score]]  # by kind of cell

    @property
    def windows(self) -> list[WindowScore]:
        return [each for each in self.scores.get(PERPLEXITY, ()) if isinstance(each, WindowScore)]

    @property
    def queries(self) -> list[QueryScore]:
        return [each for each in self.scores.get(RETRIEVAL, ()) if isinstance(each, QueryScore)]

    @property
    def perplexity(self) -> Estimate | None:
        """Return the perplexity per token of the targets."""
        nats = [each.nats / each.target_tokens for each in self.windows]
        return exponential(mean(nats)) if nats else None

    @property
    def bits_per_byte(self) -> Estimate | None:
        """Return all bits over all bytes; the interval is a ratio's, of each window's residual."""
        if not self.windows:
            return None
        ratio = sum(each.nats for each in self.windows) / _LN_2 / self.target_bytes
        spread = mean([each.nats / _LN_2 - ratio * each.target_bytes for each in self.windows])
        if spread.high is None:
            return Estimate(ratio, None, None)
        reach = (spread.high - spread.value) * len(self.windows) / self.target_bytes
        return Estimate(ratio, ratio - reach, ratio + reach)

    @property
    def retrieval(self) -> Estimate | None:
        return proportion(self.num_right, len(self.queries)) if self.queries else None

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

    def depth_bins(self) -> list[DepthBin]:
        """Return equal bins of depth, from the beginning of the text to its end."""
        inside: list[list[bool]] = [[] for _ in range(NUM_BINS)]
        for each in self.queries:
            inside[min(int(each.depth * NUM_BINS), NUM_BINS - 1)].append(each.is_right)
        return [
            DepthBin(at / NUM_BINS, (at + 1) / NUM_BINS, sum(right), len(right))
            for at, right in enumerate(inside)
        ]


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
    kv_cache_dtype: str = EXACT

    def of(self, variant: Variant) -> list[LengthRow]:
        """Return a variant's rows, shortest context first."""
        return [row for row in self.rows if row.variant == variant]


def write_report(report: LengthReport, folder: Path) -> None:
    """Write results.json, results.csv and table.txt. Raises EvalError.

    The fields are described in docs/guide/evaluation.md.
    """
    lines = [_line(row) for row in report.rows]
    csv_text = io.StringIO()
    writer = csv.DictWriter(csv_text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_files(
        folder,
        {
            "results.json": _numbers(report, lines),
            "results.csv": csv_text.getvalue(),
            "table.txt": table(report) + "\n",
        },
    )


def _line(row: LengthRow) -> dict[str, Any]:
    """Return the numbers of results.csv, which are in results.json, too."""
    line: dict[str, Any] = {
        "method": row.variant.method,
        "policy": row.variant.policy,
        "context_len": row.context_len,
        "factor": row.factor,
    }
    for name in ("perplexity", "bits_per_byte", "retrieval"):
        found: Estimate | None = getattr(row, name)
        ends = (found.value, found.low, found.high) if found else (None, None, None)
        line |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return line | {
        "num_windows": len(row.windows),
        "target_tokens": row.target_tokens,
        "target_bytes": row.target_bytes,
        "num_right": row.num_right,
        "num_queries": len(row.queries),
    }


def added_cost(row: LengthRow, base: LengthRow) -> Estimate:
    """Return the ratio of two perplexities over the same windows, compared window by window."""
    return exponential(
        mean(
            [
                one.nats / one.target_tokens - two.nats / two.target_tokens
                for one, two in zip(row.windows, base.windows, strict=True)
            ]
        )
    )


def targets_of(report: LengthReport) -> str:
    """Describe the tokens whose perplexity was measured."""
    first = report.rows[0]
    if not report.plan.prefixes:
        return f"the same {first.target_tokens} target tokens at every length"
    last = report.of(first.variant)[-1]
    return f"the last {first.target_tokens} to {last.target_tokens} tokens before each length"


def _beside(report: LengthReport, policy: str | None, row: LengthRow) -> Estimate | None:
    """Return the change of perplexity against a policy of the row's method, or no scaling (None).

    None if that was not measured, or is the row itself.
    """
    base = Variant(row.variant.method if policy else UNSCALED, policy)
    if row.variant == base or base not in report.plan.variants:
        return None
    (other,) = (each for each in report.of(base) if each.context_len == row.context_len)
    ratio = added_cost(row, other)
    low, high = (None if each is None else each - 1 for each in (ratio.low, ratio.high))
    return Estimate(ratio.value - 1, low, high)


def _numbers(report: LengthReport, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return results.json."""
    plan = report.plan
    return {
        "model": report.model,
        "model_digest": report.model_digest,
        "dtype": report.dtype,
        "device": report.device,
        **({} if report.kv_cache_dtype == EXACT else {"kv_cache_dtype": report.kv_cache_dtype}),
        "native_len": plan.native_len,
        "text": report.text,
        "text_tokens": report.text_tokens,
        "started_at": report.started_at,
        "settings": {
            "context_lens": plan.context_lens,
            "variants": [each.label for each in plan.variants],
            "windows": plan.num_windows,
            **({"prefixes": True} if plan.prefixes else {}),
            **({"chat": True} if plan.chat else {}),
            "target_tokens": plan.target_tokens,
            "queries": plan.num_queries,
            "forms": [form.name for form in plan.forms],
            "depths": plan.depths,
            "seed": plan.seed,
        },
        "results": [
            {
                **line,
                "depth_bins": [asdict(each) for each in row.depth_bins() if each.num_queries],
                "windows": [asdict(each) for each in row.windows],
                "queries": [asdict(each) for each in row.queries],
            }
            for line, row in zip(lines, report.rows, strict=True)
        ],
    }


def table(report: LengthReport) -> str:
    """Return all measurements with their intervals, with a blank line between the blocks."""
    plan, first = report.plan, report.rows[0]

    def block(
        title: str, pick: Callable[[LengthRow], Estimate | None], form: Form = _percent
    ) -> str:
        head = ["", *(f"{each} tokens" for each in plan.context_lens)]
        lines = [
            [variant.label, *(_shown(pick(row), form) for row in report.of(variant))]
            for variant in plan.variants
        ]
        return "\n".join([title, *aligned([head, *lines], num_left=1)])

    cache = "" if report.kv_cache_dtype == EXACT else f", KV cache in {report.kv_cache_dtype}"
    blocks = [
        f"{report.model}, {report.dtype} on {report.device}{cache}, trained for {plan.native_len} "
        f"tokens; text: {report.text}"
    ]
    if first.windows:
        what = (
            f"{len(first.windows)} windows of {plan.target_tokens} tokens, the same at every "
            f"length: {first.target_tokens} tokens, {first.target_bytes} bytes"
        )
        if plan.prefixes:
            most = len(report.of(first.variant)[-1].windows)
            what = (
                f"{len(first.windows)} to {most} windows of {plan.target_tokens} tokens before "
                f"each length, of {plan.num_windows} texts"
            )
        blocks += [
            block(f"perplexity per token ({what})", lambda row: row.perplexity, _plain),
            block("bits per byte (of the same)", lambda row: row.bits_per_byte, _plain),
            *(
                block(
                    f"perplexity beside {name}, % (the same windows in pairs)",
                    partial(_beside, report, policy),
                    _change,
                )
                for policy, name in ((None, "no scaling"), ("grow", "the method's own grow"))
                if policy in {each.policy for each in plan.variants} and len(plan.variants) > 1
            ),
        ]
    if first.queries:
        where = " in a chat" if plan.chat else ""
        what = f"right of {len(first.queries)} questions a length{where}"
        blocks.append(block(f"retrieval, % ({what})", lambda row: row.retrieval))
    return "\n\n".join(blocks)


def _shown(found: Estimate | None, form: Form) -> str:
    """Format an estimate as `4.21 [3.90, 4.55]`; a dash is a missing one."""
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return form(found.value)
    return f"{form(found.value)} [{form(found.low)}, {form(found.high)}]"


def _plain(value: float) -> str:
    return f"{value:.3g}" if value >= 100 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _change(value: float) -> str:
    return f"{100 * value:+.0f}" if abs(value) >= 0.2 else f"{100 * value:+.2f}"
