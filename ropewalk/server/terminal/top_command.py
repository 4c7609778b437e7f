"""`ropewalk top [URL]`: a running server's latency by context length, refreshed."""

import sys
import time
from contextlib import closing

import click

from ropewalk.server.wording import HelpCommand, api_key_option

_FAILED = 1


@click.command(cls=HelpCommand)
@click.argument("url", default="http://127.0.0.1:8000")
@click.option(
    "--seconds",
    "interval_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    default=2,
    show_default=True,
    help="Time between two answers of the server.",
)
@click.option("--since-start", is_flag=True, help="Count from the server's start.")
@click.option("--once", is_flag=True, help="Print one table since the server's start, and end.")
@api_key_option("ROPEWALK_API_KEY")
def top(url: str, interval_s: float, since_start: bool, once: bool, api_key: str | None) -> None:  # noqa: FBT001
    """Show the queue, cache and latency by context length of the server at URL.

    The numbers are those of /metrics over the last minute. Ctrl-C ends it. The exit code is
    1 if the server cannot be asked.
    """
    # Imported here, so that the other commands do not wait for the import of an HTTP client.
    from ropewalk.server.terminal.connection import ClientError, Connection  # noqa: PLC0415
    from ropewalk.server.terminal.top import History  # noqa: PLC0415

    history = History()
    is_terminal = sys.stdout.isatty()
    try:
        with closing(Connection(url, api_key)) as connection:
            while True:
                history.add(time.monotonic(), connection.get("/stats"))
                lines = history.table(since_start=since_start or once)
                if is_terminal and not once:
                    click.clear()
                click.echo("\n".join(lines))
                if once:
                    return
                time.sleep(interval_s)
    except ClientError as error:
        click.echo(f"ropewalk top: {error}", err=True)
        sys.exit(_FAILED)
    except KeyboardInterrupt:
        return
