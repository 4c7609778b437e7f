"""Rows of measurements as text, CSV and JSON: a study lists its columns, once for all three."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.studies.harness.intervals import Estimate

Form = str | Callable[[float], str]
Row = Mapping[str, Any]  # by the columns' names


@dataclass(frozen=True, slots=True)
class Column:
    """One quantity of every row."""

    name: str  # in JSON and CSV
    of: Callable[[Any], Any] | None = None  # of a subject; None: what it has by this name
    heading: str = ""  # in text, of one line or more; empty: it is not in text
    form: Form = ""  # of its numbers in text
    is_estimate: bool = False  # where it was measured
    only_text: bool = False  # it is not in JSON and CSV

    def pick(self, subject: Any) -> Any:
        """Return the quantity of a subject."""
        if self.of is not None:
            return self.of(subject)
        return subject[self.name] if isinstance(subject, Mapping) else getattr(subject, self.name)


def make_rows(columns: Sequence[Column], subjects: Iterable[Any]) -> list[Row]:
    """Return a row for each subject. A value is a number, a word, an Estimate or None."""
    return [{each.name: each.pick(subject) for each in columns} for subject in subjects]


def number(value: float | str | Estimate | None, form: Form = "") -> str:
    """Format a number, or an estimate as `4.21 [3.90, 4.55]`; a dash is a missing one."""
    if value is None:
        return "-"
    if isinstance(value, Estimate):
        text = number(value.value, form)
        if value.low is None or value.high is None:
            return text
        return f"{text} [{number(value.low, form)}, {number(value.high, form)}]"
    return format(value, form) if isinstance(form, str) else form(float(value))


def text_of(columns: Sequence[Column], rows: Iterable[Row], least: Sequence[int] = ()) -> list[str]:
    """Return lines with the headings, and a line for each row; `least` is that of `aligned`."""
    shown = [each for each in columns if each.heading]
    headings = zip(*(each.heading.split("\n") for each in shown), strict=True)
    cells = [[number(row[each.name], each.form) for each in shown] for row in rows]
    return aligned([*map(list, headings), *cells], least)


def aligned(
    rows: Sequence[Sequence[str]], least: Sequence[int] = (), *, num_left: int = 0
) -> list[str]:
    """Return lines whose cells end below each other; the first `num_left` begin so.

    `least` has the least widths of the first columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [*map(max, widths, least), *widths[len(least) :]]
    return [
        "  ".join(
            cell.ljust(width) if at < num_left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def json_of(columns: Sequence[Column], rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return an object for each row; an estimate is an object in it."""
    names = [each.name for each in columns if not each.only_text]
    return [
        {
            name: asdict(row[name]) if isinstance(row[name], Estimate) else row[name]
            for name in names
        }
        for row in rows
    ]


def flat(columns: Sequence[Column], rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return an object for each row, in which an estimate is a number and its two bounds."""
    found = []
    for row in rows:
        values: dict[str, Any] = {}
        for column in columns:
            name, value = column.name, row[column.name]
            if column.is_estimate:
                ends = ("value", "low", "high")
                value, low, high = (getattr(value, end) if value else None for end in ends)
                values |= {name: value, f"{name}_low": low, f"{name}_high": high}
            elif not column.only_text:
                values[name] = value
        found.append(values)
    return found


def csv_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a CSV with the names of the first line as its heading; None becomes empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
