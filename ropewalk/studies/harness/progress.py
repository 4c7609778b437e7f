"""The progress of a run on standard error: a bar on a terminal, otherwise lines."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import click


class Progress:
    """A listener to a run, whose methods do nothing."""

    def begin(self, length: int) -> None:
        """Take the amount of work, before any of it is done."""

    def advance(self, amount: int, item: str | None = None) -> None:
        """Take an amount of finished work, and the name of what it belongs to."""

    def log(self, line: str) -> None:
        """Take a line that a bar makes superfluous."""


@contextmanager
def printed_progress(label: str | None = None) -> Iterator[Progress]:
    """Yield a listener that prints; the label stands before its bar."""
    with ExitStack() as stack:
        yield _Printer(stack, label)


class _Printer(Progress):
    def __init__(self, stack: ExitStack, label: str | None) -> None:
        self._stack = stack
        self._label = label
        self._move: Callable[[int, str | None], None] | None = None  # None: there is no bar

    def begin(self, length: int) -> None:
        if length and sys.stderr.isatty():
            bar = click.progressbar(
                length=length, label=self._label, file=sys.stderr, item_show_func=lambda item: item
            )
            self._move = self._stack.enter_context(bar).update

    def advance(self, amount: int, item: str | None = None) -> None:
        if self._move is not None:
            self._move(amount, item)

    def log(self, line: str) -> None:
        if self._move is None:
            click.echo(line, err=True)
