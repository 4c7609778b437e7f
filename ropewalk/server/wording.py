"""Texts of errors about names and values, in one voice for settings and for fields of requests.

A text states what is accepted. The caller puts the name in front and the given value behind.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource

_MAX_NAME = 64  # characters of a misspelt name that is compared; a client may send a long one
_QUOTED = re.compile(r"'([^']*)'")

# pydantic's error type -> our text, where it depends on nothing
_PLAIN = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of at most 4300 digits",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "path_type": "must be a path",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode text",
    "tuple_type": "must be a list",
}
# pydantic's error type -> our text of its context
_LIMITS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda limit: f"must be above {_number(limit['gt'])}",
    "greater_than_equal": lambda limit: f"must be at least {_number(limit['ge'])}",
    "less_than": lambda limit: f"must be below {_number(limit['lt'])}",
    "less_than_equal": lambda limit: f"must be at most {_number(limit['le'])}",
    "literal_error": lambda limit: "must be " + limit["expected"].replace("'", ""),
    "string_pattern_mismatch": lambda limit: f"must match the pattern {limit['pattern']}",
    "string_too_long": lambda limit: (
        f"must have at most {counted(limit['max_length'], 'character')}"
    ),
    "string_too_short": lambda limit: (
        f"must have at least {counted(limit['min_length'], 'character')}"
    ),
    "too_long": lambda limit: f"must have at most {counted(limit['max_length'], 'item')}",
    "too_short": lambda limit: f"must have at least {counted(limit['min_length'], 'item')}",
}


def accepted(problem: Mapping[str, Any]) -> str:
    """Return what a field accepts, for one entry of pydantic's `ValidationError.errors()`."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _LIMITS:
        return _LIMITS[kind](context)
    # Our own validators' texts, or a type that pydantic has added.
    return str(problem["msg"]).removeprefix("Value error, ").replace("Input should", "must")


def choices(problem: Mapping[str, Any]) -> list[str]:
    """Return the accepted words of a problem with a fixed set of them, else an empty list."""
    if problem["type"] != "literal_error":
        return []
    return _QUOTED.findall(problem["ctx"]["expected"])


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the name that is misspelt, and a space before it; empty if none is.

    A wrong suggestion is worse than none, so few letters may differ, and one name is the nearest.
    """
    if not isinstance(name, str) or len(name) > _MAX_NAME:
        return ""
    num_wrong = min(len(name) // 4, max(2, len(name) // 7))
    asked = name.lower().replace("-", "_")
    near: dict[int, list[str]] = {}
    for each in known:
        if abs(len(each) - len(name)) <= num_wrong:
            near.setdefault(_edits(asked, each.lower().replace("-", "_")), []).append(each)
    least = min(near, default=num_wrong + 1)
    return (
        f" Did you mean `{near[least][0]}`?" if least <= num_wrong and len(near[least]) == 1 else ""
    )


def _edits(one: str, other: str) -> int:
    """Return how many letters, added, left out, changed or swapped, make one name the other."""
    before, row = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        last, before, row = before, row, [i]
        for j, wanted in enumerate(other, start=1):
            is_same = letter == wanted
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (not is_same)))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which has an s unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


_INDENT = 10  # of a text whose option is too long for the column, or whose line is narrow
_NARROW = 40  # characters beside the column of options; with fewer, texts stand below them


class WordWrappedFormatter(click.HelpFormatter):
    """A formatter that keeps words whole, even those longer than a line.

    click cuts them, and an option, a variable or a list of names can then not be copied.
    """

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Write options and their texts in two columns, or below each other if there is no room."""
        listed = list(rows)
        column = max((len(first) for first, _ in listed if len(first) <= col_max), default=0)
        column += col_spacing + self.current_indent
        if self.width - column < _NARROW:
            column = min(column, _INDENT)
        for first, text in listed:
            lines = self._wrapped(text, self.width - column)
            head = f"{'':{self.current_indent}}{first}"
            if lines and len(head) + col_spacing <= column:
                head = f"{head:{column}}{lines.pop(0)}"
            self.write(f"{head}\n")
            for line in lines:
                self.write(f"{'':{column}}{line}\n")

    def write_text(self, text: str) -> None:
        """Write paragraphs, indented."""
        for number, paragraph in enumerate(text.split("\n\n")):
            self.write("\n" if number else "")
            for line in self._wrapped(paragraph, self.width - self.current_indent):
                self.write(f"{'':{self.current_indent}}{line}\n")

    @staticmethod
    def _wrapped(text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class HelpContext(click.Context):
    """A context whose help is wrapped between words."""

    formatter_class = WordWrappedFormatter


class HelpCommand(click.Command):
    """A command whose help is wrapped between words."""

    context_class = HelpContext


def first_key(context: click.Context, parameter: click.Parameter, key: str | None) -> str | None:
    """Return the key that a client sends: the first one if the variable has a server's several."""
    assert parameter.name is not None
    source = context.get_parameter_source(parameter.name)
    if key is None or source is not ParameterSource.ENVIRONMENT:
        return key
    return key.partition(",")[0].strip()


def api_key_option(variable: str) -> Callable[[Any], Any]:
    """Build --api-key of a command that asks a server. `variable`: of the environment."""
    return click.option(
        "--api-key",
        metavar="KEY",
        envvar=variable,
        callback=first_key,
        help=f"API key, sent as a bearer token. Default: none.  [{variable}]",
    )


_MOST_CHARS = 2000  # of a sentence; a file may have names of any length


def printable(text: str) -> str:
    """Return a text with its control characters and other invisible ones escaped, but line breaks.

    Files of a model hold names and values of any kind, and an escape sequence in one of them could
    rename a window or hide what was printed.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def printable_sentence(text: str) -> str:
    """Return a printable text without its middle if it is very long."""
    if len(text) > _MOST_CHARS:
        half = _MOST_CHARS // 2
        text = f"{text[:half]}[{len(text) - 2 * half} characters]{text[-half:]}"
    return printable(text)
