"""One run of `ropewalk bench`: checks, the load and output of the numbers."""

import asyncio
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from server.bench.load import open_client, run_load
from server.bench.plan import BenchError, LoadPlan, choose_context_lens, parse_rope
from server.bench.plot import plot
from server.bench.progress import LoadProgress
from server.bench.report import Report, as_json, table
from server.bench.target import find_prompts, find_target, read_drafted
from server.study.plotting import PlotError, check_can_plot
from server.study.progress import printed_progress

_STDOUT = "-"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The command line options, described in `server/bench/command.py`."""

    url: str
    model: str | None
    context_lens: str | None
    output_tokens: int
    num_requests: int
    concurrency: int
    num_warmup: int
    seed: int
    timeout_s: float
    api_key: str | None
    rope: str | None
    json_path: str | None
    plot_path: Path | None


def run_bench(options: BenchOptions) -> int:
    """Send the load, write table, JSON and plot, and return the number of failed requests.

    Raises BenchError.
    """
    _check_before_the_load(options)
    report = asyncio.run(_measured(options))
    click.echo(table(report), err=options.json_path == _STDOUT)
    try:
        _write_files(options, report)
    except OSError as error:
        raise BenchError(f"cannot write {error.filename}: {error.strerror}") from error
    return report.num_failed


def _write_files(options: BenchOptions, report: Report) -> None:
    if options.json_path is not None:
        text = json.dumps(as_json(report), indent=1)
        if options.json_path == _STDOUT:
            click.echo(text)
        else:
            Path(options.json_path).write_text(text + "\n")
    if options.plot_path is None:
        return
    if any(each.num_measured for each in report.summaries()):
        plot(report, options.plot_path)
    else:
        click.echo(f"{options.plot_path} is not drawn: nothing was measured", err=True)


def _check_before_the_load(options: BenchOptions) -> None:
    """Check the options that would otherwise fail after the load. Raises BenchError."""
    parse_rope(options.rope)
    if not math.isfinite(options.timeout_s):
        raise BenchError(f"--timeout-seconds must be a finite number, got {options.timeout_s}")
    if options.api_key is not None and not (
        options.api_key.isascii() and options.api_key.isprintable()
    ):
        raise BenchError("--api-key must be printable ASCII")
    if options.plot_path is not None:
        try:
            check_can_plot(options.plot_path)
        except PlotError as error:
            raise BenchError(str(error)) from error
    if options.json_path not in (None, _STDOUT):
        path = Path(str(options.json_path))
        if path.is_dir():
            raise BenchError(f"--json: {path} is a folder")
        if not path.parent.is_dir():
            raise BenchError(f"--json: there is no folder {path.parent}")


async def _measured(options: BenchOptions) -> Report:
    async with open_client(options.api_key, options.concurrency, options.timeout_s) as client:
        target = await find_target(client, options.url, options.model)
        plan = LoadPlan(
            context_lens=choose_context_lens(
                options.context_lens, target.max_model_len, options.output_tokens
            ),
            output_tokens=options.output_tokens,
            num_requests=options.num_requests,
            concurrency=options.concurrency,
            num_warmup=options.num_warmup,
            seed=options.seed,
            timeout_s=options.timeout_s,
            rope=parse_rope(options.rope),
        )
        make_prompt = await find_prompts(client, target, plan.seed)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        with printed_progress("measuring") as progress:
            on_group = LoadProgress(plan, progress)
            before = await read_drafted(client, target)
            records = await run_load(client, target, make_prompt, plan, on_group)
            after = await read_drafted(client, target)
    drafted = None if before is None or after is None else after - before
    return Report(target, plan, make_prompt.kind, started_at, tuple(records), drafted)
