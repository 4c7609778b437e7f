"""`ropewalk bench URL`: latency against context length on a running server."""

import sys
from pathlib import Path

import click

from server.help_text import HelpCommand, api_key_option
from server.study.plotting import INSTALL_MATPLOTLIB

_SOME_FAILED, _USAGE_ERROR = 1, 2
_COUNT = click.IntRange(min=1)


@click.command(cls=HelpCommand)
@click.argument("url")
@click.option(
    "--model", metavar="NAME", help="Model name to send. Default: the first that the server lists."
)
@click.option(
    "--context-lens",
    metavar="N,N,...",
    help="Prompt lengths in tokens. Default: powers of two from 64 to what max_model_len leaves "
    "beside the output.",
)
@click.option(
    "--output-tokens",
    type=_COUNT,
    metavar="N",
    default=16,
    show_default=True,
    help="Tokens to generate per request.",
)
@click.option(
    "--requests",
    "num_requests",
    type=_COUNT,
    metavar="N",
    default=8,
    show_default=True,
    help="Measured requests per context length.",
)
@click.option(
    "--concurrency",
    type=_COUNT,
    metavar="N",
    default=1,
    show_default=True,
    help="Requests in flight, all of the same context length.",
)
@click.option(
    "--warmup",
    "num_warmup",
    type=click.IntRange(min=0),
    metavar="N",
    default=1,
    show_default=True,
    help="Requests per context length that are sent first and not measured.",
)
@click.option(
    "--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of the prompts."
)
@click.option(
    "--timeout-seconds",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=600,
    show_default=True,
    help="Seconds that one request may take.",
)
@api_key_option("OPENAI_API_KEY")
@click.option("--rope", metavar="JSON", help="The `rope` object of every request. Default: none.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="File for every number, in JSON. For - the numbers go to standard output, and the table "
    "goes to standard error.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"File for a plot of the latency, .png or .svg. Needs matplotlib: {INSTALL_MATPLOTLIB}.",
)
def bench(**options: object) -> None:
    """Measure latency against context length on the server at URL.

    The command sends streamed completions of one context length after the other. It uses public
    routes only, so it measures any server with OpenAI's interface. The exit code is 1 if a request
    failed, and 2 if the command could not begin.
    """
    # Imported here, so that the other commands do not wait for the import of an HTTP client.
    from server.bench.plan import BenchError  # noqa: PLC0415
    from server.bench.run import BenchOptions, run_bench  # noqa: PLC0415

    try:
        num_failed = run_bench(BenchOptions(**options))  # type: ignore[arg-type]
    except BenchError as error:
        click.echo(f"ropewalk bench: {error}", err=True)
        sys.exit(_USAGE_ERROR)
    if num_failed:
        sys.exit(_SOME_FAILED)
