"""One run of `ropewalk bench`: checks, the load and output of the numbers."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from ropewalk.studies.bench.load import Failure, RequestRecord, open_client, run_load
from ropewalk.studies.bench.plan import (
    BenchError,
    BenchOptions,
    Group,
    LoadPlan,
    choose_context_lens,
    parse_rope,
)
from ropewalk.studies.bench.plot import plot
from ropewalk.studies.bench.report import Report, as_json, table
from ropewalk.studies.bench.target import check_url, find_prompts, find_target, read_drafted
from ropewalk.studies.harness.plotting import PlotError, check_can_plot
from ropewalk.studies.harness.progress import Progress, printed_progress

_STDOUT = "-"


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
    return len(report.failures)


def _write_files(options: BenchOptions, report: Report) -> None:
    if options.json_path is not None:
        text = json.dumps(as_json(report), indent=1)
        if options.json_path == _STDOUT:
            click.echo(text)
        else:
            Path(options.json_path).write_text(text + "\n")
    if options.plot_path is None:
        return
    if any(each["num_measured"] for each in report.summaries()):
        plot(report, options.plot_path)
    else:
        click.echo(f"{options.plot_path} is not drawn: nothing was measured", err=True)


def _check_before_the_load(options: BenchOptions) -> None:
    """Check the options that would otherwise fail after the load. Raises BenchError."""
    check_url(options.url)
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
            before = await read_drafted(client, target)
            records = await run_load(client, target, make_prompt, plan, _teller(plan, progress))
            after = await read_drafted(client, target)
    drafted = None if before is None or after is None else after - before
    return Report(target, plan, make_prompt.kind, started_at, tuple(records), drafted)


def _teller(plan: LoadPlan, progress: Progress) -> Callable[[Group, Sequence[RequestRecord]], None]:
    """Return what counts each finished group, and logs a line for each round."""
    sent: list[RequestRecord] = []
    progress.begin(plan.num_rounds * len(plan.context_lens))

    def tell(group: Group, records: Sequence[RequestRecord]) -> None:
        sent.extend(records)
        progress.advance(1)
        if group.context_len == plan.context_lens[-1]:
            what = "warm-up, " if group.is_warmup else ""
            num_failed = sum(isinstance(each.outcome, Failure) for each in sent)
            progress.log(
                f"{what}round {group.round + 1} of {plan.num_rounds}: {len(sent)} sent, "
                f"{num_failed} failed"
            )

    return tell
