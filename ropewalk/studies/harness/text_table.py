"""Print numbers in columns that end below each other."""

from collections.abc import Sequence


def number(value: float | None, form: str) -> str:
    """Format a number; a dash is a missing one."""
    return "-" if value is None else format(value, form)


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
