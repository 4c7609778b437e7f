"""`ropewalk chat [URL]`: talk to a running server."""

import sys

import click

from ropewalk.server.wording import HelpCommand, api_key_option

_FAILED = 1


@click.command(cls=HelpCommand)
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--model", metavar="NAME", help="Served name. Default: the server's first.")
@click.option("--system", metavar="TEXT", help="System message. Default: none.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Longest answer in tokens. Default: to the end of the tier.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    metavar="NUMBER",
    help="Sampling temperature. Default: the model's.",
)
@api_key_option("ROPEWALK_API_KEY")
def chat(
    url: str, model: str | None, system: str | None, api_key: str | None, **limits: float | None
) -> None:
    """Talk to the server at URL from a terminal, or send it standard input.

    URL begins with http:// or https://. Default: http://127.0.0.1:8000. /help lists the commands
    inside. If the input is no terminal, it is sent as one message, and standard output has the
    answer only. The exit code is 1 if a request failed.
    """
    # Imported here, so that the other commands do not wait for the import of an HTTP client.
    from ropewalk.server.terminal.chat import Chat  # noqa: PLC0415
    from ropewalk.server.terminal.connection import ClientError, Connection  # noqa: PLC0415

    try:
        connection = Connection(url, api_key)
        talk = Chat(connection, model, system or "", limits)
        if sys.stdin.isatty():
            talk.converse()
        else:
            talk.answer_once(sys.stdin.read())
    except ClientError as error:
        click.echo(f"ropewalk chat: {error}", err=True)
        sys.exit(_FAILED)
    except KeyboardInterrupt:
        sys.exit(_FAILED)
