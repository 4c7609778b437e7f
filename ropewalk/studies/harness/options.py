"""The options of a study as fields of a frozen dataclass, each declared once with its help.

Values are names and numbers with commas between them. Each error names the option, the accepted
values and the value.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

COUNT = click.IntRange(min=1)
MANY = click.IntRange(min=0)
FACTOR = click.FloatRange(min=1)
FILE = click.Path(path_type=Path)
_Command = Callable[..., None]


class Refusal(click.ClickException):
    """An error that ends the command with code 2 and its sentences."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print each line after the name of the command."""
        for line in self.message.splitlines():
            click.echo(f"ropewalk eval: {line}", file=file, err=True)


if TYPE_CHECKING:
    _ParamType = click.ParamType[tuple[Any, ...]]
else:
    _ParamType = click.ParamType  # not generic in click 8.1


class Listed(_ParamType):
    """Values with commas between them; a default is a tuple already."""

    def convert(
        self, value: Any, param: click.Parameter | None, _ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Parse the values. Raises Refusal."""
        assert param is not None
        found = value if isinstance(value, tuple) else self.parse(param.opts[0], value)
        return tuple(found)

    def parse(self, flag: str, text: str) -> Iterable[Any]:
        """Return the values in a text."""
        raise NotImplementedError


class Names(Listed):
    """Names, each once and in the accepted order; with a mapping, the values of the names."""

    name = "NAME"

    def __init__(self, accepted: Iterable[str]) -> None:
        self._accepted: Mapping[str, Any] = (
            accepted if isinstance(accepted, Mapping) else {each: each for each in accepted}
        )

    def parse(self, flag: str, text: str) -> Iterable[Any]:
        """Return the values of the names. Raises Refusal."""
        asked = [part.strip() for part in text.split(",")]
        for name in asked:
            if name not in self._accepted:
                raise Refusal(f"{flag} must be of {', '.join(self._accepted)}; got {name!r}")
        # Two names may have one value.
        return dict.fromkeys(value for name, value in self._accepted.items() if name in asked)


class SteppedNames(Names):
    """Names, each once, with steps: `yarn@8` has a tier every 8 tokens."""

    def parse(self, flag: str, text: str) -> Iterable[str]:
        """Return the names with their steps. Raises Refusal."""
        for part in text.split(","):
            name, at, step = part.partition("@")
            if name not in self._accepted:
                raise Refusal(f"{flag} must be of {', '.join(self._accepted)}; got {part!r}")
            if at and not (step.isascii() and step.isdigit() and int(step)):
                raise Refusal(
                    f"{flag}: behind @ stands a whole number of tokens from 1, got {part!r}"
                )
        return dict.fromkeys(text.split(","))


class Integers(Listed):
    """Integers, each once and ascending; `most` is the largest, and then 1 the smallest."""

    name = "N,N"

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def parse(self, flag: str, text: str) -> Iterable[int]:
        """Return the integers. Raises Refusal."""
        try:
            numbers = sorted({int(part) for part in text.split(",")})
        except ValueError as error:
            raise Refusal(
                f"{flag} must be integers with commas between them, got {text!r}"
            ) from error
        for each in numbers:
            if self._most is not None and not 1 <= each <= self._most:
                raise Refusal(f"{flag} must be from 1 to {self._most}, got {each}")
        return numbers


class Percents(Listed):
    """Shares as `0,50,100` percent, each once and ascending."""

    name = "N,N"

    def parse(self, flag: str, text: str) -> Iterable[float]:
        """Return the shares. Raises Refusal."""
        try:
            shares = sorted({float(part) / 100 for part in text.split(",")})
        except ValueError as error:
            raise Refusal(
                f"{flag} must be numbers with commas between them, got {text!r}"
            ) from error
        for each in shares:
            if not 0 <= each <= 1:
                raise Refusal(f"{flag} must be from 0 to 100 percent, got {100 * each:g}")
        return shares


def option(help_text: str, kind: Any = None, default: Any = None, **more: Any) -> Any:
    """Return a field of a class of options.

    The flag is the field's name without `num_`, and the value's name follows from the type, unless
    `flag` and `metavar` say otherwise. The rest of `more` goes to click.
    """
    return field(default=default, metadata={"help": help_text, "type": kind, **more})


def with_options(
    options: type, *, without: Collection[str] = (), **defaults: Any
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds an option for each field of a dataclass, by the field's name.

    Those of the class come before those of its bases. `without` names fields that the command does
    not have, and `defaults` are its own.
    """
    inherited = {
        name for base in options.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())
    }
    ordered = sorted(fields(options), key=lambda each: each.name in inherited)

    def decorate(command: _Command) -> _Command:
        for each in reversed(ordered):
            if each.metadata and each.name not in without:
                command = _click_option(each, defaults.get(each.name, each.default))(command)
        return command

    return decorate


def _click_option(each: Field[Any], default: Any) -> Callable[[_Command], _Command]:
    more = {"default": None if default is MISSING else default, **each.metadata}
    flag = more.pop("flag", f"--{each.name.removeprefix('num_').replace('_', '-')}")
    more.setdefault("metavar", _metavar(each.name, more["type"]))
    # Several values are listed in the help of the option, where this is worth it.
    more.setdefault("show_default", default not in (None, ()) and not isinstance(default, tuple))
    return click.option(flag, each.name, **more)


def _metavar(name: str, kind: Any) -> str | None:
    """Return the name of a value in the help."""
    if isinstance(kind, click.Path):
        return "PATH"
    if isinstance(kind, Listed):
        return f"{kind.name},..."
    return "TOKENS" if name.endswith(("_tokens", "_len")) else "N"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The options of every comparison of `ropewalk eval`."""

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
