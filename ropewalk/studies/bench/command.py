"""`ropewalk bench URL`: latency against context length on a running server."""

import sys
from typing import Any

import click

from ropewalk.server.wording import HelpCommand
from ropewalk.studies.bench.plan import BenchError, BenchOptions
from ropewalk.studies.harness.options import with_options

_SOME_FAILED, _USAGE_ERROR = 1, 2


@click.command(cls=HelpCommand)
@click.argument("url")
@with_options(BenchOptions)
def bench(**options: Any) -> None:
    """Measure latency against context length on the server at URL.

    The command sends streamed completions of one context length after the other. It uses public
    routes only, so it measures any server with OpenAI's interface. The exit code is 1 if a request
    failed, and 2 if the command could not begin.
    """
    # Imported here, so that the other commands do not wait for the import of an HTTP client.
    from ropewalk.studies.bench.run import run_bench  # noqa: PLC0415

    try:
        num_failed = run_bench(BenchOptions(**options))
    except BenchError as error:
        click.echo(f"ropewalk bench: {error}", err=True)
        sys.exit(_USAGE_ERROR)
    if num_failed:
        sys.exit(_SOME_FAILED)
