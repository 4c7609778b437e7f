"""Outcomes of the tier-change comparison as numbers with intervals: table, JSON and CSV.

Every policy decodes the same windows, so differences are computed per window. They are more precise
than the levels, because the spread of the levels is mostly that of the texts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from server.policy_eval.measure import CROSSING_POLICIES, CrossingPolicy, Outcome
from server.policy_eval.options import CrossingOptions
from server.study.intervals import Estimate, bootstrap, exponential, proportion

# Each policy against `pinned`, and the two policies that compute nothing at a tier change.
COMPARED: tuple[tuple[CrossingPolicy, CrossingPolicy], ...] = (
    ("grow", "pinned"),
    ("grow-exact", "pinned"),
    ("stale", "pinned"),
    ("stale", "grow"),
)

Key = tuple[str, int, CrossingPolicy]  # method, number of tier changes, policy
Outcomes = Mapping[Key, Sequence[Outcome]]  # in the order of the windows


@dataclass(frozen=True, slots=True)
class CrossingRow:
    """One policy at one number of tier changes."""

    method: str
    num_crossings: int
    policy: CrossingPolicy
    num_windows: int
    num_scored: int  # tokens, over all windows
    perplexity: Estimate  # bootstrap over windows
    num_found: int
    retrieval: Estimate  # Wilson
    decode_s: float  # mean over windows, first decoded token to last
    step_ms: float  # median between two tokens
    crossing_ms: float | None  # median at the last tier change; None: there is none


@dataclass(frozen=True, slots=True)
class Difference:
    """One policy minus another over the same windows; bootstrap over windows."""

    method: str
    num_crossings: int
    policy: CrossingPolicy
    against: CrossingPolicy
    num_windows: int
    nll: Estimate  # nats per token; 0.01 is about 1 % of perplexity
    num_found_only_here: int  # windows answered correctly only by `policy`
    num_found_only_there: int
    retrieval: Estimate  # share of windows
    decode_time: float  # ratio of the mean times


@dataclass(frozen=True, slots=True)
class CrossingReport:
    """The results of a whole run."""

    model: str
    native_len: int  # L, of the run
    options: CrossingOptions
    outcomes: Outcomes


def rows_of(outcomes: Outcomes) -> list[CrossingRow]:
    """Return a row per method, number of tier changes and policy, in order of measurement."""
    return [_row(key, each) for key, each in outcomes.items()]


def differences_of(outcomes: Outcomes) -> list[Difference]:
    """Return every comparison of COMPARED with both sides measured."""
    found = []
    for method, num_crossings in dict.fromkeys(key[:2] for key in outcomes):
        for policy, against in COMPARED:
            ours = outcomes.get((method, num_crossings, policy))
            theirs = outcomes.get((method, num_crossings, against))
            if ours and theirs:
                found.append(_difference((method, num_crossings, policy), against, ours, theirs))
    return found


def _row(key: Key, windows: Sequence[Outcome]) -> CrossingRow:
    method, num_crossings, policy = key
    nll = bootstrap([_mean_nll(each) for each in windows])
    num_found = sum(each.found for each in windows)
    last = [each.crossing_s[-1] for each in windows if each.crossing_s]
    return CrossingRow(
        method,
        num_crossings,
        policy,
        len(windows),
        sum(len(each.nll) for each in windows),
        exponential(nll),
        num_found,
        proportion(num_found, len(windows)),
        statistics.fmean(each.decode_s for each in windows),
        1000 * statistics.median(each.step_s for each in windows),
        1000 * statistics.median(last) if last else None,
    )


def _difference(
    key: Key, against: CrossingPolicy, ours: Sequence[Outcome], theirs: Sequence[Outcome]
) -> Difference:
    pairs = list(zip(ours, theirs, strict=True))
    return Difference(
        *key,
        against,
        len(pairs),
        bootstrap([_mean_nll(one) - _mean_nll(other) for one, other in pairs]),
        sum(one.found and not other.found for one, other in pairs),
        sum(other.found and not one.found for one, other in pairs),
        bootstrap([float(one.found) - float(other.found) for one, other in pairs]),
        sum(each.decode_s for each in ours) / sum(each.decode_s for each in theirs),
    )


def _mean_nll(outcome: Outcome) -> float:
    return math.fsum(outcome.nll) / len(outcome.nll)


def as_json(report: CrossingReport) -> dict[str, Any]:
    """Return the requested settings, the rows and the differences."""
    return {
        "settings": {
            "model": report.model,
            **asdict(report.options),
            "output": str(report.options.output),
            "native_len": report.native_len,
        },
        "rows": [asdict(each) for each in rows_of(report.outcomes)],
        "differences": [asdict(each) for each in differences_of(report.outcomes)],
    }


def flat(row: CrossingRow | Difference) -> dict[str, Any]:
    """Return the numbers by name, for a line of a CSV; an estimate has three of them."""
    found: dict[str, Any] = {}
    for each in fields(row):
        value = getattr(row, each.name)
        if isinstance(value, Estimate):
            found |= {
                each.name: value.value,
                f"{each.name}_low": value.low,
                f"{each.name}_high": value.high,
            }
        else:
            found[each.name] = value
    return found


_LEVELS = ("crossings", "policy", "windows", "perplexity", "found", "of all",
           "decode s", "step ms", "crossing ms")  # fmt: skip
_DIFFERENCES = ("crossings", "policy", "against", "nats a token", "perplexity", "only here",
                "only there", "found", "time")  # fmt: skip


def table(outcomes: Outcomes) -> str:
    """Return levels, then differences, in a block for each method."""
    rows, differences = rows_of(outcomes), differences_of(outcomes)
    blocks = []
    for method in dict.fromkeys(each.method for each in rows):
        levels = [_level_cells(each) for each in rows if each.method == method]
        paired = [_difference_cells(each) for each in differences if each.method == method]
        blocks.append(f"{method}: after the last crossing, 95 % intervals")
        blocks.append(_aligned([_LEVELS, *levels]))
        if paired:
            blocks.append(f"{method}: differences over the same windows")
            blocks.append(_aligned([_DIFFERENCES, *paired]))
    return "\n\n".join(blocks)


def _level_cells(row: CrossingRow) -> tuple[str, ...]:
    return (
        str(row.num_crossings),
        row.policy,
        str(row.num_windows),
        _with_interval(row.perplexity, ".3f"),
        f"{row.num_found}/{row.num_windows}",
        _with_interval(row.retrieval, ".0%"),
        f"{row.decode_s:.2f}",
        f"{row.step_ms:.1f}",
        "-" if row.crossing_ms is None else f"{row.crossing_ms:.1f}",
    )


def _difference_cells(row: Difference) -> tuple[str, ...]:
    return (
        str(row.num_crossings),
        row.policy,
        row.against,
        _with_interval(row.nll, "+.4f"),
        f"{math.expm1(row.nll.value):+.1%}",
        str(row.num_found_only_here),
        str(row.num_found_only_there),
        _with_interval(row.retrieval, "+.0%"),
        f"x {row.decode_time:.2f}",
    )


def _with_interval(each: Estimate, form: str) -> str:
    return f"{each.value:{form}} [{each.low:{form}}, {each.high:{form}}]"


def _aligned(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def in_order(outcomes: Outcomes) -> dict[Key, Sequence[Outcome]]:
    """Sort by method as measured, then by number of tier changes, then by policy."""
    methods = list(dict.fromkeys(key[0] for key in outcomes))
    keys = sorted(
        outcomes, key=lambda key: (methods.index(key[0]), key[1], CROSSING_POLICIES.index(key[2]))
    )
    return {key: outcomes[key] for key in keys}
