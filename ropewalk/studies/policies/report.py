"""Outcomes of the tier-change comparison as numbers with intervals: table, JSON and CSV.

Every policy decodes the same windows, so differences are computed per window. They are more precise
than the levels, because the spread of the levels is mostly that of the texts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.studies.harness.frame import Column, Row, csv_of, flat, json_of, make_rows, text_of
from ropewalk.studies.harness.intervals import Estimate, bootstrap, exponential, proportion
from ropewalk.studies.policies.measure import CROSSING_POLICIES, CrossingPolicy, Outcome
from ropewalk.studies.policies.options import CrossingOptions

# Each policy against `fixed`, and the two policies that compute nothing at a tier change.
COMPARED: tuple[tuple[CrossingPolicy, CrossingPolicy], ...] = (
    ("grow", "fixed"),
    ("grow-exact", "fixed"),
    ("stale", "fixed"),
    ("stale", "grow"),
)
_SETTINGS = (
    *("output", "methods", "num_crossings", "num_windows", "windows_together", "scored_tokens"),
    *("lead_tokens", "native_len", "seed", "resumes"),
)

Key = tuple[str, int, CrossingPolicy]  # method, number of tier changes, policy
Outcomes = Mapping[Key, Sequence[Outcome]]  # in the order of the windows


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows under a policy at a number of tier changes, or under another one beside it."""

    method: str
    num_crossings: int
    policy: CrossingPolicy
    ours: Sequence[Outcome]
    against: CrossingPolicy | None = None
    theirs: Sequence[Outcome] = ()

    @property
    def num_windows(self) -> int:
        return len(self.ours)

    @property
    def num_found(self) -> int:
        return sum(each.found for each in self.ours)

    @property
    def crossing_ms(self) -> float | None:
        """Return the median at the last tier change, or None if there is none."""
        last = [each.crossing_s[-1] for each in self.ours if each.crossing_s]
        return 1000 * statistics.median(last) if last else None

    def difference(self) -> Estimate:
        """Return the nats a token that the policy has more; 0.01 is about 1 % of perplexity."""
        return bootstrap([_nats(one) - _nats(other) for one, other in self._pairs()])

    def found_more(self) -> Estimate:
        """Return the share of windows that the policy answers more."""
        return bootstrap([float(one.found) - float(other.found) for one, other in self._pairs()])

    def num_only(self, *, here: bool) -> int:
        """Return the windows answered only by the policy, or only by the other one."""
        return sum(one.found is here and other.found is not here for one, other in self._pairs())

    def decode_ratio(self) -> float:
        """Return the ratio of the mean times."""
        ours, theirs = (sum(each.decode_s for each in side) for side in (self.ours, self.theirs))
        return ours / theirs

    def _pairs(self) -> list[tuple[Outcome, Outcome]]:
        return list(zip(self.ours, self.theirs, strict=True))


_ABOUT = (
    Column("method"),
    Column("num_crossings", heading="crossings"),
    Column("policy", heading="policy"),
)
LEVELS = (
    *_ABOUT,
    Column("num_windows", heading="windows"),
    Column("num_scored", lambda each: sum(len(one.nll) for one in each.ours)),
    Column(
        "perplexity", lambda each: exponential(bootstrap([_nats(one) for one in each.ours])),
        "perplexity", ".3f", is_estimate=True,
    ),
    Column("num_found"),
    Column("found", lambda each: f"{each.num_found}/{each.num_windows}", "found", only_text=True),
    Column(
        "retrieval", lambda each: proportion(each.num_found, each.num_windows), "of all", ".0%",
        is_estimate=True,
    ),
    Column(
        "decode_s", lambda each: statistics.fmean(one.decode_s for one in each.ours), "decode s",
        ".2f",
    ),
    Column(
        "step_ms", lambda each: 1000 * statistics.median(one.step_s for one in each.ours),
        "step ms", ".1f",
    ),
    Column("crossing_ms", heading="crossing ms", form=".1f"),
)  # fmt: skip
DIFFERENCES = (
    *_ABOUT,
    Column("against", heading="against"),
    Column("num_windows"),
    Column("nll", Windows.difference, "nats a token", "+.4f", is_estimate=True),
    Column(
        "ratio", lambda each: math.expm1(each.difference().value), "perplexity", "+.1%",
        only_text=True,
    ),
    Column("num_found_only_here", lambda each: each.num_only(here=True), "only here"),
    Column("num_found_only_there", lambda each: each.num_only(here=False), "only there"),
    Column("retrieval", Windows.found_more, "found", "+.0%", is_estimate=True),
    Column("decode_time", Windows.decode_ratio, "time", lambda value: f"x {value:.2f}"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CrossingReport:
    """The results of a whole run."""

    model: str
    native_len: int  # L, of the run
    options: CrossingOptions
    outcomes: Outcomes


def rows_of(outcomes: Outcomes) -> list[Row]:
    """Return a row per method, number of tier changes and policy, in order of measurement."""
    return make_rows(LEVELS, [Windows(*key, ours) for key, ours in outcomes.items()])


def differences_of(outcomes: Outcomes) -> list[Row]:
    """Return every comparison of COMPARED with both sides measured."""
    subjects = []
    for at in dict.fromkeys(key[:2] for key in outcomes):
        for policy, against in COMPARED:
            ours, theirs = outcomes.get((*at, policy)), outcomes.get((*at, against))
            if ours and theirs:
                subjects.append(Windows(*at, policy, ours, against, theirs))
    return make_rows(DIFFERENCES, subjects)


def _nats(outcome: Outcome) -> float:
    """Return the mean of the scored tokens."""
    return math.fsum(outcome.nll) / len(outcome.nll)


def files_of(report: CrossingReport) -> dict[str, Any]:
    """Return the texts of the files by name."""
    rows, differences = rows_of(report.outcomes), differences_of(report.outcomes)
    numbers = {
        "settings": {
            "model": report.model,
            **{name: getattr(report.options, name) for name in _SETTINGS},
            "output": str(report.options.output),
            "native_len": report.native_len,
        },
        "rows": json_of(LEVELS, rows),
        "differences": json_of(DIFFERENCES, differences),
    }
    return {
        "crossings.json": numbers,
        "crossings.csv": csv_of(flat(LEVELS, rows)),
        "crossings_differences.csv": csv_of(flat(DIFFERENCES, differences)),
        "crossings.txt": table(report.outcomes) + "\n",
    }


def table(outcomes: Outcomes) -> str:
    """Return levels, then differences, in a block for each method."""
    blocks = []
    levels, differences = rows_of(outcomes), differences_of(outcomes)
    for method in dict.fromkeys(key[0] for key in outcomes):
        for columns, rows, title in (
            (LEVELS, levels, "after the last crossing, 95 % intervals"),
            (DIFFERENCES, differences, "differences over the same windows"),
        ):
            own = [each for each in rows if each["method"] == method]
            if own:
                blocks += [f"{method}: {title}", "\n".join(text_of(columns, own))]
    return "\n\n".join(blocks)


def in_order(outcomes: Outcomes) -> dict[Key, Sequence[Outcome]]:
    """Sort by method as measured, then by number of tier changes, then by policy."""
    methods = list(dict.fromkeys(key[0] for key in outcomes))
    keys = sorted(
        outcomes, key=lambda key: (methods.index(key[0]), key[1], CROSSING_POLICIES.index(key[2]))
    )
    return {key: outcomes[key] for key in keys}
