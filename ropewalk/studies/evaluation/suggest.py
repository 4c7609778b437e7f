"""`--suggest`: the suggested deployment for some lengths, from the measurements."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ropewalk.studies.evaluation.intervals import mean, proportion
from ropewalk.studies.evaluation.plan import METHODS, LengthPlan, Variant
from ropewalk.studies.evaluation.report import LengthReport


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant over all requested lengths."""

    variant: Variant
    num_right: int
    num_queries: int
    nats: tuple[float, ...]  # per target token, of each window, in order of length
    reaches: bool  # whether its deployment serves the longest of these lengths

    @property
    def mean_nats(self) -> float | None:
        return math.fsum(self.nats) / len(self.nats) if self.nats else None

    @property
    def share(self) -> float:
        return self.num_right / self.num_queries if self.num_queries else 0.0

    def numbers(self) -> str:
        """Return the numbers as text."""
        found = []
        if self.num_queries:
            found.append(f"retrieval {self.num_right} of {self.num_queries}")
        if self.mean_nats is not None:
            found.append(f"perplexity {math.exp(self.mean_nats):.4g}")
        return ", ".join(found)


def suggestion(report: LengthReport, name: str, model: str | None) -> str:
    """Return a block for `ropewalk serve --config`, with the reasons as its comments.

    Candidates stay if their retrieval is within the 95 % interval of the best. They also need a
    perplexity that is not worse than the lowest. The 95 % interval of the differences on the same
    windows decides that. The simplest of the rest is suggested. The
    untouched table is served up to L only.
    """
    lens = report.plan.suggested_lens
    candidates = [_candidate(report, each, lens) for each in report.plan.variants]
    possible = [each for each in candidates if each.reaches]
    if not possible:
        return (
            f"# Nothing to suggest: of {', '.join(each.label for each in report.plan.variants)} "
            f"none serves {max(lens)} tokens."
        )
    chosen = _best(possible)
    lines = [
        f"# For contexts of {_listed(lens)} tokens: {chosen.variant.label} ({chosen.numbers()}),",
        "# the simplest of those whose retrieval and perplexity equal the best within the spread.",
    ]
    ranked = sorted(candidates, key=lambda each: (-each.share, each.mean_nats or 0.0))
    for each in ranked:
        if each is not chosen:
            note = "" if each.reaches else f"; is served up to {report.plan.native_len} tokens only"
            lines.append(f"#   {each.variant.label}: {each.numbers()}{note}")
    return "\n".join([*lines, *_block(report.plan, chosen.variant, name, model)])


def _candidate(report: LengthReport, variant: Variant, lens: Sequence[int]) -> Candidate:
    rows = [row for row in report.of(variant) if row.context_len in lens]
    return Candidate(
        variant,
        sum(row.num_right for row in rows),
        sum(len(row.queries) for row in rows),
        tuple(each.nats / each.target_tokens for row in rows for each in row.windows),
        variant.policy is not None or max(lens) <= report.plan.native_len,
    )


def _best(candidates: Sequence[Candidate]) -> Candidate:
    best = max(candidates, key=lambda each: each.share)
    least = 0.0
    if best.num_queries:
        least = proportion(best.num_right, best.num_queries).low or 0.0
    alike = [each for each in candidates if each.share >= least]
    lowest = min(alike, key=lambda each: (each.mean_nats or 0.0, -each.share))
    alike = [each for each in alike if not _is_worse(each, lowest)]
    return min(alike, key=lambda each: (_effort(each.variant), each.mean_nats or 0.0, -each.share))


def _is_worse(candidate: Candidate, best: Candidate) -> bool:
    """Return whether a candidate is worse by perplexity on the same windows.

    The windows are paired, because their texts differ far more than the variants.
    """
    if not best.nats:
        return candidate.share < best.share
    difference = mean([one - other for one, other in zip(candidate.nats, best.nats, strict=True)])
    return difference.value > 0 and (difference.low is None or difference.low > 0)


def _effort(variant: Variant) -> tuple[int, bool]:
    """Return a sort key: no scaling, by_position, grow, fixed; the log-n switch is last.

    Fixed comes after the others, because these leave short requests unscaled.
    """
    policies = {None: 0, "by_position": 1, "grow": 2, "fixed": 3}
    is_plain = variant.method in METHODS and "use_logn_attn" not in METHODS[variant.method]
    return policies[variant.policy], not is_plain


def _block(plan: LengthPlan, variant: Variant, name: str, model: str | None) -> list[str]:
    """Return YAML for `server/config_file.py`; JSON's flow style is YAML, too."""
    entry = plan.entry(variant)
    lines = [] if model is None else [f"model: {json.dumps(model)}"]
    lines += ["deployments:", f"  - name: {json.dumps(name)}"]
    if plan.carries_scaling:
        return lines
    scaling = entry.rope_scaling if variant.policy else {"rope_type": "default"}
    lines += [
        f"    rope_scaling: {json.dumps(scaling)}",
        f"    rope_policy: {entry.rope_policy if variant.policy else 'fixed'}",
    ]
    if entry.max_model_len is not None:
        lines.append(f"    max_model_len: {entry.max_model_len}")
    return lines


def _listed(lens: Sequence[int]) -> str:
    return " and ".join(str(each) for each in lens)
