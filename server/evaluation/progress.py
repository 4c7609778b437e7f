"""Progress of a run on standard error: a bar on a terminal, otherwise a line per cell."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from server.evaluation.cells import Cell


@contextmanager
def progress(cells: Sequence[Cell]) -> Iterator["Progress"]:
    """Yield a Progress to update with finished tokens and cells.

    `cells` are the cells still to measure.
    """
    num_tokens = sum(cell.num_tokens for cell in cells)
    if not sys.stderr.isatty() or not cells:
        yield Progress(len(cells), None)
        return
    with click.progressbar(
        length=num_tokens,
        file=sys.stderr,
        show_eta=True,
        item_show_func=_shown,
    ) as bar:
        yield Progress(len(cells), bar.update)


class Progress:
    """A counter of cells, which passes tokens to the bar if there is one."""

    def __init__(self, num_cells: int, bar: Callable[[int, Cell], None] | None) -> None:
        self._num_cells = num_cells
        self._bar = bar
        self._num_done = 0

    def on_tokens(self, cell: Cell) -> Callable[[int], None]:
        """Return a callback for the prompt tokens of a cell."""
        bar = self._bar
        if bar is None:
            return lambda _: None
        return lambda num_tokens: bar(num_tokens, cell)

    def finished(self, cell: Cell, seconds: float) -> None:
        """Record a cell that is measured and saved."""
        self._num_done += 1
        if self._bar is None:
            click.echo(
                f"{self._num_done} of {self._num_cells}: {_name(cell)}, {seconds:.1f} s", err=True
            )


def _shown(cell: Cell | None) -> str:
    return "" if cell is None else _name(cell)


def _name(cell: Cell) -> str:
    tier = cell.placement.tier
    profile = tier.profile
    logn = "+logn" if profile.logn_len is not None else ""
    table = f"{profile.scaling.rope_type}{logn} x{tier.factor:g}"
    return f"{cell.kind}, {cell.context_len} tokens, {table}"
