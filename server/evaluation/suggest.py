"""`--suggest`: the deployment to choose for some lengths, from what was measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from server.evaluation.intervals import proportion
from server.evaluation.plan import EvalPlan, Variant
from server.evaluation.report import Report, Row


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant over all lengths that were asked about."""

    variant: Variant
    num_right: int
    num_queries: int
    mean_nats: float | None  # per target token, over the lengths
    reaches: bool  # whether a deployment of it serves the longest of them

    @property
    def share(self) -> float:
        """Of right answers; 0 of none."""
        return self.num_right / self.num_queries if self.num_queries else 0.0

    def numbers(self) -> str:
        """For a reader."""
        found = []
        if self.num_queries:
            found.append(f"retrieval {self.num_right} of {self.num_queries}")
        if self.mean_nats is not None:
            found.append(f"perplexity {math.exp(self.mean_nats):.4g}")
        return ", ".join(found)


def suggestion(report: Report, name: str, model: str | None) -> str:
    """A block for `ropewalk serve --config`, with the reasons as its comments.

    The best retrieval, and all that cannot be told from it by its 95 % interval, stay; of those the
    lowest perplexity wins. The untouched table is served up to L only.
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
        "# the lowest perplexity among those whose retrieval cannot be told from the best.",
    ]
    ranked = sorted(candidates, key=lambda each: (-each.share, each.mean_nats or 0.0))
    for each in ranked:
        if each is not chosen:
            note = "" if each.reaches else f"; is served up to {report.plan.native_len} tokens only"
            lines.append(f"#   {each.variant.label}: {each.numbers()}{note}")
    return "\n".join([*lines, *_block(report.plan, chosen.variant, name, model)])


def _candidate(report: Report, variant: Variant, lens: Sequence[int]) -> Candidate:
    rows = [row for row in report.of(variant) if row.context_len in lens]
    nats = [_mean_nats(row) for row in rows if row.windows]
    return Candidate(
        variant,
        sum(row.num_right for row in rows),
        sum(len(row.queries) for row in rows),
        math.fsum(nats) / len(nats) if nats else None,
        variant.policy is not None or max(lens) <= report.plan.native_len,
    )


def _mean_nats(row: Row) -> float:
    return math.fsum(each.nats for each in row.windows) / row.target_tokens


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Of equal ones the simpler: the untouched table, then pinned, which spares short ones."""
    order = {None: 0, "pinned": 1, "fixed": 2}
    best = max(candidates, key=lambda each: each.share)
    least = 0.0
    if best.num_queries:
        least = proportion(best.num_right, best.num_queries).low or 0.0
    alike = [each for each in candidates if each.share >= least]
    return min(
        alike,
        key=lambda each: (
            each.mean_nats if each.mean_nats is not None else -each.share,
            order[each.variant.policy],
        ),
    )


def _block(plan: EvalPlan, variant: Variant, name: str, model: str | None) -> list[str]:
    """YAML, as `server/config_file.py` reads it; JSON's flow style is YAML, too."""
    entry = plan.entry(variant)
    lines = [] if model is None else [f"model: {json.dumps(model)}"]
    lines += ["deployments:", f"  - name: {json.dumps(name)}"]
    if plan.carries_scaling:
        return lines
    scaling = entry.rope_scaling if variant.policy else {"rope_type": "default"}
    lines += [
        f"    rope_scaling: {json.dumps(scaling)}",
        f"    rope_policy: {variant.policy or 'fixed'}",
    ]
    if variant.policy == "pinned":
        lines.append(f"    rope_tiers: {json.dumps(entry.rope_tiers)}")
    return lines


def _listed(lens: Sequence[int]) -> str:
    return " and ".join(str(each) for each in lens)
