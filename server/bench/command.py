"""`ropewalk bench URL`: latency against context length on a running server."""

import sys
from pathlib import Path

import click

_SOME_FAILED, _USAGE_ERROR = 1, 2
_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("url")
@click.option("--model", metavar="NAME", help="Served name. Default: the first served.")
@click.option(
    "--context-lens",
    metavar="N,N,...",
    help="Prompt lengths in tokens. Default: powers of two from 64 up to max_model_len minus the "
    "output.",
)
@click.option(
    "--output-tokens",
    type=_COUNT,
    default=16,
    show_default=True,
    help="Tokens to generate per request.",
)
@click.option(
    "--requests",
    "num_requests",
    type=_COUNT,
    default=8,
    show_default=True,
    help="Measured requests per context length.",
)
@click.option(
    "--concurrency",
    type=_COUNT,
    default=1,
    show_default=True,
    help="Requests in flight, all of the same context length.",
)
@click.option(
    "--warmup",
    "num_warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Requests per context length that are sent first and not measured.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@click.option(
    "--timeout-seconds",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    show_default=True,
    help="Seconds that one request may take.",
)
@click.option(
    "--api-key",
    envvar="OPENAI_API_KEY",
    help="Sent as a bearer token. Default: none.  [OPENAI_API_KEY]",
)
@click.option("--rope", metavar="JSON", help="The `rope` object of every request. Default: none.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write every number there; - is standard output, the table then goes to standard error.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw it there, .png or .svg; needs matplotlib, the extra `plot`.",
)
def bench(**options: object) -> None:
    """Measure latency against context length on the server at URL.

    Sends streamed completions of every context length in turn, over public routes only, so any
    server with OpenAI's interface can be measured. Ends with code 1 if a request failed, 2 if it
    could not begin.
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
