"""Progress of a load on standard error: a bar on a terminal, otherwise a line per round."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from server.bench.load import Failure, RequestRecord
from server.bench.plan import Group, LoadPlan

OnGroup = Callable[[Group, list[RequestRecord]], None]


@contextmanager
def progress(plan: LoadPlan) -> Iterator[OnGroup]:
    """Yield a callback for each finished group."""
    if not sys.stderr.isatty():
        yield _Lines(plan)
        return
    num_groups = plan.num_rounds * len(plan.context_lens)
    with click.progressbar(length=num_groups, label="measuring", file=sys.stderr) as bar:
        yield lambda _, __: bar.update(1)


class _Lines:
    """A line at the end of each round."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._num_sent = 0
        self._num_failed = 0

    def __call__(self, group: Group, records: list[RequestRecord]) -> None:
        self._num_sent += len(records)
        self._num_failed += sum(isinstance(each.outcome, Failure) for each in records)
        if group.context_len != self._plan.context_lens[-1]:
            return
        what = "warm-up, " if group.is_warmup else ""
        click.echo(
            f"{what}round {group.round + 1} of {self._plan.num_rounds}: "
            f"{self._num_sent} sent, {self._num_failed} failed",
            err=True,
        )
