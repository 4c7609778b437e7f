"""`python -m benchmarks.compare.serving`: the same scenarios on two servers, in turns."""

import asyncio
import os
import random
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks.compare.ratios import Line, table
from benchmarks.compare.record import Record, RecordError, Row
from benchmarks.compare.scenarios import SCENARIOS, Scenario, choose_scenarios, sizes
from benchmarks.compare.sending import FIRST_ID, Prompts, ScenarioError, Sender
from ropewalk.studies.bench.load import open_client
from ropewalk.studies.bench.plan import BenchError
from ropewalk.studies.bench.target import Target, find_target

_SOME_FAILED, _USAGE_ERROR = 1, 2


@dataclass(frozen=True, slots=True)
class Measured:
    """A server that is measured, with its name on the command line."""

    name: str
    target: Target
    sender: Sender


@dataclass(frozen=True, slots=True)
class Plan:
    """The scenarios of one run, and its numbers of rounds."""

    scenarios: tuple[Scenario, ...]
    num_rounds: int
    num_warmup: int
    vocab_size: int


class Run:
    """One run over its servers. `failed` has the errors of the scenarios that failed."""

    def __init__(self, servers: Sequence[Measured], plan: Plan, record: Record) -> None:
        self._servers = servers
        self._plan = plan
        self._record = record
        self.failed: dict[str, str] = {}

    async def run(self) -> None:
        """Warm up, then measure all rounds that are not in the record yet."""
        scenarios = [each for each in self._plan.scenarios if self._fits(each)]
        for _ in range(self._plan.num_warmup):
            for scenario in scenarios:
                missing = [
                    server for server in self._servers
                    if len(self._done(scenario, server)) < self._plan.num_rounds
                ]  # fmt: skip
                for server in missing:
                    await self._measure(scenario, server, None)
        for number in range(self._plan.num_rounds):
            # The order alternates, so that neither server is always measured after the other.
            servers = self._servers if number % 2 == 0 else self._servers[::-1]
            for scenario in scenarios:
                for server in servers:
                    if number not in self._done(scenario, server):
                        await self._measure(scenario, server, number)

    def lines(self) -> list[Line]:
        """Build the table's lines from the record's rows of this run's scenarios and rounds."""
        found = []
        for scenario in self._plan.scenarios:
            by_server = [self._done(scenario, server) for server in self._servers]
            if any(by_server):
                found += [
                    Line(
                        scenario.name,
                        metric,
                        tuple(
                            {number: row.values[metric.name] for number, row in rows.items()}
                            for rows in by_server
                        ),
                    )
                    for metric in scenario.metrics
                ]
        return found

    def remarks(self) -> list[str]:
        """Return remarks on joined events, late requests and errors."""
        found: dict[str, None] = {}
        for scenario in self._plan.scenarios:
            for server in self._servers:
                for row in self._done(scenario, server).values():
                    where = f"{scenario.name}, {server.name}, round {row.round + 1}"
                    if row.num_events < row.num_tokens:
                        found[f"{where}: {row.num_events} events for {row.num_tokens} tokens"] = (
                            None
                        )
                    if row.remark is not None:
                        found[f"{where}: {row.remark}"] = None
        return [*found, *(f"{name} failed: {error}" for name, error in self.failed.items())]

    def _done(self, scenario: Scenario, server: Measured) -> dict[int, Row]:
        rows = self._record.finished(scenario.name, sizes(scenario), server.name)
        return {number: row for number, row in rows.items() if number < self._plan.num_rounds}

    def _fits(self, scenario: Scenario) -> bool:
        for server in self._servers:
            longest = server.target.max_model_len
            if longest is not None and scenario.longest > longest:
                click.echo(
                    f"{scenario.name} is skipped: it needs {scenario.longest} positions, "
                    f"{server.name} serves {longest}",
                    err=True,
                )
                return False
        return True

    async def _measure(self, scenario: Scenario, server: Measured, number: int | None) -> None:
        """Measure one scenario on one server. `number` None is a warm-up, which is not recorded."""
        if scenario.name in self.failed:
            return
        # Each measurement has a new seed, because a cache may hold earlier prompts. They may be of
        # a run that was stopped in this round, or of another name of the same server.
        seed = random.SystemRandom().getrandbits(32)
        prompts = Prompts(random.Random(seed), self._plan.vocab_size)  # noqa: S311  # no secrets
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        load_1min = os.getloadavg()[0]
        values: dict[str, float] = {}
        num_tokens, num_events, remark, error = 0, 0, None, None
        try:
            outcome = await scenario.run(server.sender, prompts)
            values = {metric.name: value for metric, value in outcome.values.items()}
            num_tokens, num_events = outcome.num_tokens, outcome.num_events
            remark = outcome.remark
        except ScenarioError as problem:
            error = str(problem)
            self.failed[scenario.name] = f"{server.name}: {error}"
        _say(scenario, server, number, values, error)
        if number is None:
            return
        self._record.add(
            Row(
                scenario=scenario.name,
                sizes=sizes(scenario),
                server=server.name,
                model=server.target.model,
                round=number,
                started_at=started_at,
                seed=seed,
                load_1min=load_1min,
                values=values,
                num_tokens=num_tokens,
                num_events=num_events,
                remark=remark,
                error=error,
            )
        )


def _say(
    scenario: Scenario,
    server: Measured,
    number: int | None,
    values: dict[str, float],
    error: str | None,
) -> None:
    when = "warm-up" if number is None else f"round {number + 1}"
    numbers = ", ".join(
        f"{each.name} {values[each.name]:.4g} {each.unit}"
        for each in scenario.metrics
        if each.name in values
    )
    click.echo(f"{when}  {scenario.name}  {server.name}: {error or numbers}", err=True)


def _server(text: str) -> tuple[str, str]:
    """Split `name=url` into its two parts."""
    name, sign, url = text.partition("=")
    if not (name and sign and url):
        raise click.BadParameter(f"must be NAME=URL, got {text!r}")
    return name, url


def _servers(_: object, __: object, texts: Iterable[str]) -> list[tuple[str, str]]:
    found = [_server(each) for each in texts]
    names = [name for name, _ in found]
    if len(found) > 2 or len(set(names)) < len(names):
        raise click.BadParameter(f"one server, or two of different names, got {', '.join(names)}")
    return found


def _chosen(_: object, __: object, text: str | None) -> tuple[Scenario, ...]:
    try:
        return choose_scenarios(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


async def _run(
    servers: Sequence[tuple[str, str]], plan: Plan, record: Record, timeout_s: float
) -> Run:
    concurrency = max(each.concurrency for each in plan.scenarios)
    async with AsyncExitStack() as stack:
        measured = []
        for name, url in servers:
            # llama.cpp's server closes connections between two requests.
            client = await stack.enter_async_context(
                open_client(None, concurrency, timeout_s, keeps_connections=False)
            )
            target = await find_target(client, url, None)
            record.check_model(name, target.model)
            measured.append(Measured(name, target, Sender(client, target, timeout_s)))
        run = Run(measured, plan, record)
        await run.run()
    return run


@click.command()
@click.argument(
    "servers", nargs=-1, required=True, metavar="NAME=URL [NAME=URL]", callback=_servers
)
@click.option(
    "--record",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Each finished round is a line there; rounds that it has already are not measured again.",
)
@click.option(
    "--scenarios",
    callback=_chosen,
    metavar="NAME,NAME,...",
    help=f"Of {', '.join(each.name for each in SCENARIOS)}; `prefill` and `context` are all of "
    "theirs. Left out: all.",
)
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--warmup",
    "num_warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Rounds that are sent first and not kept.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(min=FIRST_ID + 1),
    default=4096,
    show_default=True,
    help=f"Prompts are token ids from {FIRST_ID} to below this.",
)
@click.option(
    "--timeout-seconds",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=3600,
    show_default=True,
    help="Seconds that one request may take.",
)
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def main(
    servers: list[tuple[str, str]],
    path: Path,
    scenarios: tuple[Scenario, ...],
    timeout_s: float,
    *,
    markdown: bool,
    num_rounds: int,
    num_warmup: int,
    vocab_size: int,
) -> None:
    """Measure one server, or two in turns, and compare the first to the second.

    Ends with code 1 if a scenario failed, 2 if the run could not begin.
    """
    plan = Plan(scenarios, num_rounds, num_warmup, vocab_size)
    try:
        run = asyncio.run(_run(servers, plan, Record(path), timeout_s))
    except (BenchError, RecordError) as error:
        click.echo(f"benchmarks.compare.serving: {error}", err=True)
        sys.exit(_USAGE_ERROR)
    click.echo(table(run.lines(), [name for name, _ in servers], markdown=markdown))
    for remark in run.remarks():
        click.echo(remark, err=True)
    if run.failed:
        sys.exit(_SOME_FAILED)


if __name__ == "__main__":
    main()
