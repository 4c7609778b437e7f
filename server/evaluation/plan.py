"""What `ropewalk eval` will measure: lengths, methods and policies, counts."""

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
ANSWER_TOKENS = 6  # five digits take five tokens at most, and a tokenizer may begin with a space
_MOST_TARGETS = 128  # of a window, where nothing is said
_SHORTEST = 64  # tokens: needles, their question and some text


class EvalError(Exception):
    """It cannot be measured or not be written; the message is a whole sentence."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to rescale: a row of the report."""

    method: str
    policy: str | None  # None: the untouched table, which has none

    @property
    def label(self) -> str:
        """For instance `yarn pinned`."""
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
    suggested_lens: tuple[int, ...]  # those to suggest a deployment for

    @property
    def longest(self) -> int:
        """The longest context, in tokens."""
        return self.context_lens[-1]

    @property
    def factor(self) -> float:
        """What the longest context takes: longest / L, 1 at least."""
        return max(1.0, self.longest / self.native_len)

    @property
    def multiples(self) -> tuple[float, ...]:
        """Tiers as multiples of L: one that ends at each length beyond it."""
        beyond = [each / self.native_len for each in self.context_lens if each > self.native_len]
        return (1.0, *beyond)

    def entry(self, variant: Variant) -> DeploymentEntry:
        """The deployment that serves a variant, as a configuration file would have it.

        The untouched table is asked for by name (`{"rope_type": "default"}`), of a deployment
        whose tiers reach far enough. A checkpoint that carries scaling is served as it is.
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
    """Every method under every policy, the untouched table once. Raises EvalError."""
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
    """What was asked for, else L/2, L and, if nothing is to be suggested, 2L, 4L, 8L.

    Lengths to suggest for are always among them. Raises EvalError.
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
    """`256,1024` -> [256, 1024]; none of nothing. Raises EvalError."""
    if text is None:
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise EvalError(
            f"{flag} must be integers with commas between them, got {text!r}"
        ) from error


def parse_depths(text: str) -> tuple[float, ...]:
    """`0,50,100` percent -> (0.0, 0.5, 1.0), rising. Raises EvalError."""
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
    """Forms by name. Raises EvalError."""
    by_name = {form.name: form for form in FORMS}
    return tuple(by_name[name] for name in _names("--forms", text, tuple(by_name)))


def choose_target_tokens(asked: int | None, shortest: int) -> int:
    """Half of the shortest context at most, so that every length has some context before them."""
    if asked is None:
        return min(_MOST_TARGETS, shortest // 2)
    if asked >= shortest:
        raise EvalError(
            f"--target-tokens must be < {shortest} (the shortest of --context-lens), got {asked}"
        )
    return asked


def _names(flag: str, text: str | None, accepted: tuple[str, ...]) -> tuple[str, ...]:
    """In the accepted order, each once."""
    if text is None:
        return accepted
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in accepted:
            raise EvalError(f"{flag} must be of {', '.join(accepted)}; got {name!r}")
    return tuple(name for name in accepted if name in asked)
