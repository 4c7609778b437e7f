"""Values of the options of `ropewalk eval`, parsed by click's callbacks.

Each error names the option, the accepted values and the value.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import IO, Any

import click

from server.corpus.needles import FORMS, SENTENCE, Form
from server.evaluation.plan import METHODS, PLACED, POLICIES
from server.evaluation.tasks.make import TASKS
from server.policy_eval.options import METHODS as CROSSING_METHODS
from server.policy_eval.options import MOST_CROSSINGS


class Refusal(click.ClickException):
    """An error that ends the command with code 2 and its sentences."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"ropewalk eval: {line}", file=file, err=True)


class Comparison(Enum):
    """The comparison of one run; the values are the flags that select it."""

    LENGTHS = ""
    TASKS = "--tasks"
    POLICIES = "--policies"


class ComparisonOption(click.Option):
    """An option of only some of the comparisons."""

    def __init__(self, *args: Any, of: Sequence[Comparison], **options: Any) -> None:
        super().__init__(*args, **options)
        self.of = of

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Parse the option. Raises UsageError in another comparison: it would do nothing."""
        running = _comparison(ctx)
        if self.name in opts and running not in self.of:
            if running is Comparison.LENGTHS:
                needed = f"without {self.of[0].value}"
            else:
                needed = f"with {running.value}"
            raise click.UsageError(f"{self.opts[0]} has no meaning {needed}", ctx)
        return super().handle_parse_result(ctx, opts, args)


def _comparison(ctx: click.Context) -> Comparison:
    if ctx.params["policies"]:
        return Comparison.POLICIES
    return Comparison.TASKS if ctx.params["tasks"] else Comparison.LENGTHS


def parse_tasks(_: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Parse names of tasks, and None into none of them."""
    return () if text is None else _names(param, text, TASKS)


def parse_lens(_: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Parse `1024,256` into (256, 1024), and None into an empty tuple."""
    return () if text is None else _integers(param, text)


def parse_crossings(_: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """Parse `2,1` into (1, 2)."""
    counts = _integers(param, text)
    for count in counts:
        if not 1 <= count <= MOST_CROSSINGS:
            raise Refusal(f"{param.opts[0]} must be from 1 to {MOST_CROSSINGS}, got {count}")
    return counts


def parse_depths(_: click.Context, param: click.Parameter, text: str) -> tuple[float, ...]:
    """Parse `0,50,100` percent into (0.0, 0.5, 1.0), ascending."""
    flag = param.opts[0]
    try:
        depths = sorted({float(part) / 100 for part in text.split(",")})
    except ValueError as error:
        raise Refusal(f"{flag} must be numbers with commas between them, got {text!r}") from error
    for depth in depths:
        if not (math.isfinite(depth) and 0 <= depth <= 1):
            raise Refusal(f"{flag} must be from 0 to 100 percent, got {100 * depth:g}")
    return tuple(depths)


def parse_forms(_: click.Context, param: click.Parameter, text: str | None) -> tuple[Form, ...]:
    """Parse names into forms, and None into those of source files."""
    if text is None:
        return FORMS
    forms = (*FORMS, SENTENCE)
    names = _names(param, text, [form.name for form in forms])
    return tuple(form for form in forms if form.name in names)


def parse_rope_policies(
    _: click.Context, param: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """Parse names of policies, and None into all of them."""
    return _names(param, text, POLICIES)


def parse_methods(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Parse names of methods, and None into the default of the comparison."""
    if not ctx.params["policies"]:
        return _names(param, text, [*METHODS, *PLACED]) if text else tuple(METHODS)
    methods = "yarn" if text is None else text
    return tuple(dict.fromkeys(_crossing_method(param, part) for part in methods.split(",")))


def choose_num_windows(ctx: click.Context, param: click.Parameter, count: int | None) -> int:
    """Return the count, or the default of the comparison."""
    if not ctx.params["policies"]:
        return 6 if count is None else count
    if count == 0:
        raise Refusal(f"{param.opts[0]} must be >= 1 with --policies, got 0")
    return count or 32


def choose_output(ctx: click.Context, _: click.Parameter, folder: Path | None) -> Path:
    """Return the folder, or the default of the comparison."""
    defaults = {
        Comparison.LENGTHS: "ropewalk-eval",
        Comparison.TASKS: "ropewalk-tasks",
        Comparison.POLICIES: "ropewalk-crossings",
    }
    return folder or Path(defaults[_comparison(ctx)])


def _integers(param: click.Parameter, text: str) -> tuple[int, ...]:
    """Parse integers, and return each once, ascending."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise Refusal(
            f"{param.opts[0]} must be integers with commas between them, got {text!r}"
        ) from error


def _names(param: click.Parameter, text: str | None, accepted: Sequence[str]) -> tuple[str, ...]:
    """Parse names, and return each once in the accepted order; None is all of them."""
    if text is None:
        return tuple(accepted)
    asked = [part.strip() for part in text.split(",")]
    for name in asked:
        if name not in accepted:
            raise Refusal(f"{param.opts[0]} must be of {', '.join(accepted)}; got {name!r}")
    return tuple(name for name in accepted if name in asked)


def _crossing_method(param: click.Parameter, text: str) -> str:
    """Check `yarn`, or `yarn@8` for a tier every 8 tokens."""
    flag = param.opts[0]
    name, at, step = text.partition("@")
    if name not in CROSSING_METHODS:
        raise Refusal(f"{flag} must be of {', '.join(CROSSING_METHODS)}; got {text!r}")
    if at and not (step.isascii() and step.isdigit() and int(step)):
        raise Refusal(f"{flag}: behind @ stands a whole number of tokens from 1, got {text!r}")
    return text
