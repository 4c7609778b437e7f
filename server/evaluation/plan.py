"""The plan of `ropewalk eval`: lengths, methods, policies and counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope import NativeRope
from server.corpus.needles import FORMS, Form
from server.settings.sections import DeploymentEntry

UNSCALED = "none"
# Name -> rope_type and fields beside the factor.
METHODS: dict[str, dict[str, Any]] = {
    UNSCALED: {"rope_type": "default"},
    "linear": {"rope_type": "linear"},
    "ntk": {"rope_type": "ntk"},
    "dynamic": {"rope_type": "dynamic"},
    "yarn": {"rope_type": "yarn"},
    "llama3": {"rope_type": "llama3"},
    "yarn+logn": {"rope_type": "yarn", "use_logn_attn": True},
}
POLICIES = ("fixed", "pinned")
ANSWER_TOKENS = 6  # five digits take max five tokens, and a tokenizer may begin with a space
_MOST_TARGETS = 128  # of a window, the default max
_SHORTEST = 64  # tokens: needles, their question and some text


class EvalError(Exception):
    """A measurement or a write that is impossible; the message is a whole sentence."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A method and a policy, which is one row of the report."""

    method: str
    policy: str | None  # None: the untouched table, which has none

    @property
    def label(self) -> str:
        """Return a label, for example `yarn pinned`."""
        return self.method if self.policy is None else f"{self.method} {self.policy}"


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The settings of one run. Lengths are in tokens, counts are per context length."""

    native_len: int
    carries_scaling: bool  # the checkpoint's own table is a scaled one, and the only one
    context_lens: tuple[int, ...]
    variants: tuple[Variant, ...]
    num_windows: int
    target_tokens: int  # of each window
    num_queries: int
    forms: tuple[Form, ...]
    depths: tuple[float, ...]  # of needles, 0 to 1
    seed: int
    suggested_lens: tuple[int, ...]  # the lengths to suggest a deployment for

    @property
    def longest(self) -> int:
        """Return the longest context, in tokens."""
        return self.context_lens[-1]

    @property
    def factor(self) -> float:
        """Return the factor for the longest context: longest / L, min 1."""
        return max(1.0, self.longest / self.native_len)

    @property
    def multiples(self) -> tuple[float, ...]:
        """Return tiers as multiples of L, one that ends at each length beyond L."""
        beyond = [each / self.native_len for each in self.context_lens if each > self.native_len]
        return (1.0, *beyond)

    def entry(self, variant: Variant) -> DeploymentEntry:
        """Return the deployment that serves a variant, as an entry of a configuration file.

        The untouched table is requested by name (`{"rope_type": "default"}`) from a deployment with
        tiers that reach far enough. A checkpoint that carries scaling is served unchanged.
        """
        if self.carries_scaling:
            return DeploymentEntry(name=variant.label)
        block = METHODS["linear" if variant.policy is None else variant.method]
        scaling = {**block, "factor": self.factor}
        if variant.policy == "fixed":
            return DeploymentEntry(name=variant.label, rope_scaling=scaling, rope_policy="fixed")
        return DeploymentEntry(
            name=variant.label,
            rope_scaling=scaling,
            rope_policy="pinned",
            rope_tiers=self.multiples,
        )


def choose_variants(methods: str | None, policies: str | None) -> tuple[Variant, ...]:
    """Return every method with every policy, the untouched table once. Raises EvalError."""
    chosen = _names("--methods", methods, tuple(METHODS))
    under = _names("--rope-policies", policies, POLICIES)
    variants = []
    for method in chosen:
        if method == UNSCALED:
            variants.append(Variant(method, None))
        else:
            variants += [Variant(method, policy) for policy in under]
    return tuple(variants)


def choose_context_lens(
    text: str | None, native: NativeRope, suggested: Sequence[int]
) -> tuple[int, ...]:
    """Return the requested lengths, or the default L/2 and L.

    Without lengths to suggest for, the default also has 2L, 4L and 8L. Lengths to suggest for are
    always included. Raises EvalError.
    """
    native_len = native.native_len
    lens = parse_lens("--context-lens", text)
    if text is None:
        lens = [native_len // 2, native_len]
        if not suggested:
            lens += [2 * native_len, 4 * native_len, 8 * native_len]
    lens = sorted({*lens, *suggested})
    if lens[0] < _SHORTEST:
        raise EvalError(f"--context-lens must be >= {_SHORTEST} tokens, got {lens[0]}")
    return tuple(lens)


def parse_lens(flag: str, text: str | None) -> list[int]:
    """Parse `256,1024` into [256, 1024], and None into an empty list. Raises EvalError."""
    if text is None:
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise EvalError(
            f"{flag} must be integers with commas between them, got {text!r}"
        ) from error


def parse_depths(text: str) -> tuple[float, ...]:
    """Parse `0,50,100` percent into (0.0, 0.5, 1.0), ascending. Raises EvalError."""
    try:
        depths = sorted({float(part) / 100 for part in text.split(",")})
    except ValueError as error:
        raise EvalError(
            f"--depths must be numbers with commas between them, got {text!r}"
        ) from error
    for depth in depths:
        if not (math.isfinite(depth) and 0 <= depth <= 1):
            raise EvalError(f"--depths must be from 0 to 100 percent, got {100 * depth:g}")
    return tuple(depths)


def parse_forms(text: str | None) -> tuple[Form, ...]:
    """Parse names into forms. Raises EvalError."""
    by_name = {form.name: form for form in FORMS}
    return tuple(by_name[name] for name in _names("--forms", text, tuple(by_name)))


def choose_target_tokens(asked: int | None, shortest: int) -> int:
    """Return the number of targets, max half of the shortest context.

    Every length then has some context before the targets.
    """
    if asked is None:
        return min(_MOST_TARGETS, shortest // 2)
    if asked >= shortest:
        raise EvalError(
            f"--target-tokens must be < {shortest} (the shortest of --context-lens), got {asked}"
        )
    return asked


def _names(flag: str, text: str | None, accepted: tuple[str, ...]) -> tuple[str, ...]:
    """Parse names, and return each once in the accepted order."""
    if text is None:
        return accepted
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in accepted:
            raise EvalError(f"{flag} must be of {', '.join(accepted)}; got {name!r}")
    return tuple(name for name in accepted if name in asked)
