"""The plan of `ropewalk eval`: lengths, methods, policies and counts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ropewalk.rope import OTHER_POLICY_NAMES, NativeRope
from ropewalk.rope.positions_from_block import parse_positions
from ropewalk.server.corpus.needles import FORMS, SENTENCE, Form
from ropewalk.server.settings.load import SettingsError
from ropewalk.server.settings.sections import DeploymentEntry
from ropewalk.studies.harness.options import (
    COUNT,
    FILE,
    MANY,
    Listed,
    Names,
    option,
)

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
# Position methods under the trained table. `fixed` reads by them from the first token on.
PLACED: dict[str, dict[str, Any]] = {
    name: {"rope_type": "default", "positions": {"method": name}}
    for name in ("dual_chunk", "rerope", "self_extend", "string", "sinks")
}
POLICIES = ("fixed", "by_position", "grow")
FITTING = ("by_position", "grow")  # their tables follow the length
_MOST_TARGETS = 128  # of a window, the default max
_WINDOWS_AT_AN_END = 32  # of a text that is read once, before each length
_SHORTEST = 64  # tokens: needles, their question and some text


class EvalError(SettingsError):
    """A measurement or a write that is impossible; the message is a whole sentence."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A method and a policy, which is one row of the report."""

    method: str
    policy: str | None  # None: the untouched table, which has none

    @property
    def label(self) -> str:
        """Return a label, for example `yarn by_position`."""
        return self.method if self.policy is None else f"{self.method} {self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """The options of the command line that are not settings; lengths are in tokens."""

    context_lens: tuple[int, ...] = option(
        "Context lengths in tokens. Default: 1/2, 1, 2, 4 and 8 times the trained length.",
        Listed(COUNT),
        (),
    )
    methods: tuple[str, ...] = option(
        f"Methods: {', '.join(METHODS)}. Default: all of these. Position methods: "
        f"{', '.join(PLACED)}.",
        Names([*METHODS, *PLACED]),
        tuple(METHODS),
    )
    rope_policies: tuple[str, ...] = option(
        "Policies: fixed (one factor, the longest length's), by_position (each token's own) and "
        "grow (each length's own). Default: the first two.",
        Names({**{each: each for each in POLICIES}, **OTHER_POLICY_NAMES}),
        POLICIES[:2],
    )
    rope_factor: float | None = option(
        "The factor of scaled methods. Default: that of the longest context, over the trained "
        "length. A larger one measures what a deployment for longer contexts does at these.",
        click.FloatRange(min=1),
    )
    native_len: int | None = option(
        "The trained length, if it shall be less than the checkpoint's. Tiers begin there, and a "
        "run of a model with a long context becomes affordable.",
        COUNT,
    )
    num_windows: int = option(
        "Spans of text whose perplexity is measured, the same at every length. 0: none.", MANY, 6
    )
    prefixes: bool = option(
        "Read so many texts from their beginnings, and measure the spans before each length. One "
        "request a table then measures all lengths, and each length has spans of its own.",
        default=False,
        is_flag=True,
        metavar=None,
        show_default=False,
    )
    target_tokens: int | None = option(
        "Tokens of each span. Default: half of the shortest length, at most 128.", COUNT
    )
    num_queries: int = option(
        "Questions per context length, about four in each context. The answer to each is a needle "
        "hidden in the text. 0: none.",
        MANY,
        32,
    )
    forms: tuple[Form, ...] = option(
        "Forms of the needles: print, assign, assert, passkey, and sentence for texts in English. "
        "Default: all but sentence.",
        Names({form.name: form for form in (*FORMS, SENTENCE)}),
        FORMS,
    )
    chat: bool = option(
        "Ask for needles in a chat: text and question are a user's message, in the model's chat "
        "template. Without it, the text goes on with a question.",
        default=False,
        is_flag=True,
        metavar=None,
        show_default=False,
    )
    depths: tuple[float, ...] = option(
        "Depths of the needles, in percent of the text; 0 is its beginning. Default: "
        "0,14,29,43,57,71,86,100.",
        Listed(click.FloatRange(0, 100)),
        (0.0, 14.0, 29.0, 43.0, 57.0, 71.0, 86.0, 100.0),
    )
    suggest: tuple[int, ...] = option(
        "Context lengths to suggest a deployment for. It is printed as YAML.", Listed(COUNT), ()
    )
    seed: int = option("Seed of the choice of spans, contexts and needles.", int, 0)
    texts: tuple[Path, ...] = option(
        "Text file, or folder of text files. May be given several times. Default: sources of "
        "Python's standard library that the embedded model was not trained on.",
        FILE,
        (),
        flag="--text",
        multiple=True,
    )
    output: Path = option(  # noqa: RUF009  # a field
        "Folder for the numbers, the table and the plots. A run continues from the numbers of an "
        "earlier run in the folder.",
        click.Path(path_type=Path, file_okay=False),
        Path("ropewalk-eval"),
        metavar="DIR",
    )
    resumes: bool = option(
        "Measure everything anew.",
        default=True,
        flag="--no-resume",
        flag_value=False,
        metavar=None,
        show_default=False,
    )


@dataclass(frozen=True, slots=True)
class LengthPlan:
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
    is_native_len_stated: bool = False  # not the checkpoint's own
    least_factor: float = 1.0  # of scaled methods
    chat: bool = False  # whether needles are asked for in a chat
    prefixes: bool = False  # whether a length's context is the beginning of the longest one's
    suggested_lens: tuple[int, ...] = ()  # the lengths to suggest a deployment for

    @property
    def longest(self) -> int:
        """Return the longest context, in tokens."""
        return self.context_lens[-1]

    @property
    def factor(self) -> float:
        return max(1.0, self.longest / self.native_len, self.least_factor)

    def windows_at(self, context_len: int) -> int:
        """Return the number of windows before a length of a text that is read once."""
        return max(1, min(_WINDOWS_AT_AN_END, context_len // 2 // self.target_tokens))

    def entry(self, variant: Variant) -> DeploymentEntry:
        """Return the deployment that serves a variant, as an entry of a configuration file.

        The untouched table is requested by name (`{"rope_type": "default"}`) from a deployment with
        tiers that reach far enough. Tiers are those of a server with the factor longest / L. A
        checkpoint that carries scaling is served unchanged.
        """
        if self.carries_scaling:
            return DeploymentEntry(name=variant.label)
        if variant.method in PLACED:
            return self._placed_entry(variant)
        block = METHODS["linear" if variant.policy is None else variant.method]
        scaling = {**block, "factor": self.factor}
        if self.is_native_len_stated:
            scaling["original_max_position_embeddings"] = self.native_len
        policy = "grow" if variant.policy is None else variant.policy
        return DeploymentEntry(name=variant.label, rope_scaling=scaling, rope_policy=policy)

    def _placed_entry(self, variant: Variant) -> DeploymentEntry:
        """Return the deployment of a position method, whose reach is the longest context."""
        block = PLACED[variant.method]
        when = "always" if variant.policy == "fixed" else "pinned"
        if when == "pinned" and self.longest <= self.native_len:
            return DeploymentEntry(name=variant.label, rope_scaling=METHODS[UNSCALED])
        scaling = {**block, "positions": {**block["positions"], "when": when}}
        return DeploymentEntry(
            name=variant.label,
            rope_scaling=scaling,
            rope_policy="grow" if variant.policy == "fixed" else variant.policy,
            max_model_len=self.longest,
        )


def make_plan(options: LengthOptions, native: NativeRope) -> LengthPlan:
    """Check the options against each other and the model's length. Raises EvalError."""
    if options.num_windows == options.num_queries == 0:
        raise EvalError("--windows and --queries must not both be 0: nothing would be measured")
    native = _with_length(options, native)
    lens = _context_lens(options, native.native_len)
    _check_reach(options, native.native_len, lens[-1])
    if native.carries_scaling:
        if options.methods != (UNSCALED,):
            raise EvalError(
                f"--methods must be {UNSCALED}: the checkpoint was trained with "
                f"{native.method.scaling.rope_type}, and is measured under its own table; got "
                f"{','.join(options.methods)}"
            )
        if lens[-1] > native.native_len:
            raise EvalError(
                f"--context-lens must be <= {native.native_len} (the checkpoint's own length), got "
                f"{lens[-1]}"
            )
    return LengthPlan(
        native_len=native.native_len,
        carries_scaling=native.carries_scaling,
        context_lens=lens,
        variants=_variants(options),
        num_windows=options.num_windows,
        target_tokens=_target_tokens(options.target_tokens, lens[0]),
        num_queries=options.num_queries,
        forms=options.forms,
        depths=tuple(each / 100 for each in options.depths),
        seed=options.seed,
        is_native_len_stated=options.native_len is not None,
        least_factor=options.rope_factor or 1.0,
        chat=options.chat,
        prefixes=options.prefixes,
        suggested_lens=options.suggest,
    )


def _with_length(options: LengthOptions, native: NativeRope) -> NativeRope:
    """Return the tables before an added block, with the stated length. Raises EvalError."""
    native = native.trained
    if options.native_len is None:
        return native
    if native.carries_scaling or not set(options.methods).isdisjoint(PLACED):
        raise EvalError(
            f"--native-len {options.native_len} needs a checkpoint without scaling, and methods "
            f"without positions ({', '.join(PLACED)})"
        )
    if options.native_len > native.native_len:
        raise EvalError(
            f"--native-len must be <= what the checkpoint was trained for ({native.native_len}), "
            f"got {options.native_len}"
        )
    return replace(native, native_len=options.native_len)


def _check_reach(options: LengthOptions, native_len: int, longest: int) -> None:
    """Raise EvalError if a method does not reach the longest context (`string`)."""
    for name in options.methods:
        if name not in PLACED:
            continue
        choice = parse_positions(PLACED[name]["positions"], native_len, longest)
        reach = None if choice is None else choice.method.reach(native_len)
        if reach is not None and reach < longest:
            raise EvalError(
                f"--context-lens must be <= {reach} for {name} (what it reaches), got {longest}"
            )


def _variants(options: LengthOptions) -> tuple[Variant, ...]:
    """Return every method with every policy, and the untouched table once."""
    variants = []
    for method in options.methods:
        if method == UNSCALED:
            variants.append(Variant(method, None))
        else:
            variants += [Variant(method, policy) for policy in options.rope_policies]
    return tuple(variants)


def _context_lens(options: LengthOptions, native_len: int) -> tuple[int, ...]:
    """Return the requested lengths, or the default L/2 and L.

    Without lengths to suggest for, the default also has 2L, 4L and 8L. Lengths to suggest for are
    always included. Raises EvalError.
    """
    lens = options.context_lens
    if not lens:
        lens = (native_len // 2, native_len)
        if not options.suggest:
            lens += (2 * native_len, 4 * native_len, 8 * native_len)
    lens = tuple(sorted({*lens, *options.suggest}))
    if lens[0] < _SHORTEST:
        raise EvalError(f"--context-lens must be >= {_SHORTEST} tokens, got {lens[0]}")
    return lens


def _target_tokens(asked: int | None, shortest: int) -> int:
    """Return the number of targets, max half of the shortest context.

    Every length then has some context before the targets. Raises EvalError.
    """
    if asked is None:
        return min(_MOST_TARGETS, shortest // 2)
    if asked >= shortest:
        raise EvalError(
            f"--target-tokens must be < {shortest} (the shortest of --context-lens), got {asked}"
        )
    return asked
