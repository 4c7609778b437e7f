"""The options of a study as fields of a frozen dataclass, each declared once with its help.

Some have several values with commas between them. Each error names the option, the accepted values
and the value.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

COUNT = click.IntRange(min=1)
MANY = click.IntRange(min=0)
FILE = click.Path(path_type=Path)
_Command = Callable[..., None]

if TYPE_CHECKING:
    _ParamType = click.ParamType[tuple[Any, ...]]
else:
    _ParamType = click.ParamType  # not generic in click 8.1


class Listed(_ParamType):
    """Values with commas between them, each once and ascending; a default is a tuple already."""

    name = "N,N"

    def __init__(self, kind: Any) -> None:
        """Take the type of one value."""
        self._kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Parse the values, each as one of its type."""
        if isinstance(value, tuple):
            return value
        return tuple(sorted({self._kind(part.strip(), param, ctx) for part in value.split(",")}))


class Names(Listed):
    """Names, each once and in the accepted order; with a mapping, the values of the names."""

    name = "NAME"

    def __init__(self, accepted: Iterable[str]) -> None:
        super().__init__(click.Choice(list(accepted)))
        self._accepted: Mapping[str, Any] = (
            accepted if isinstance(accepted, Mapping) else {each: each for each in accepted}
        )

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Parse the names."""
        if isinstance(value, tuple):
            return value
        asked = super().convert(value, param, ctx)
        # Two names may have one value.
        return tuple(dict.fromkeys(each for name, each in self._accepted.items() if name in asked))


def option(help_text: str, kind: Any = None, default: Any = None, **more: Any) -> Any:
    """Return a field of a class of options.

    The flag is the field's name without `num_`, and the value's name follows from the type, unless
    `flag` and `metavar` say otherwise. The rest of `more` goes to click.
    """
    return field(default=default, metadata={"help": help_text, "type": kind, **more})


def with_options(options: type) -> Callable[[_Command], _Command]:
    """Return a decorator that adds an option for each field of a dataclass, by the field's name."""

    def decorate(command: _Command) -> _Command:
        for each in reversed(fields(options)):
            if each.metadata:
                command = _click_option(each)(command)
        return command

    return decorate


def _click_option(each: Field[Any]) -> Callable[[_Command], _Command]:
    default = each.default
    more = {"default": default, **each.metadata}
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
