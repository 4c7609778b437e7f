"""`ropewalk config check FILE`: what would be served, without weights."""

import click

from ropewalk.server.sentences import sentences
from ropewalk.server.settings.flags import SettingsCommand
from ropewalk.server.settings.load import chat_template_text, load_settings
from ropewalk.server.startup.gate import address_of, check_traces, key_table_of, tls_context
from ropewalk.server.wording import printable


@click.command(cls=SettingsCommand)
@click.argument("file")
def check(file: str) -> None:
    """Show what `ropewalk serve --config FILE` would serve here, without loading weights.

    The output lists deployments, tiers, the longest context and memory. Variables of the
    environment override the file. If the server would refuse to start, the exit code is 2, and a
    sentence gives the reason.
    """
    with sentences():
        settings = load_settings({"config": file})
        # As in `serve`: the files that settings name, and the address.
        key_table_of(settings), tls_context(settings), chat_template_text(settings)
        address_of(settings)
        check_traces(settings)
        # Imported here, so that a wrong key does not wait for it.
        from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415
        from ropewalk.server.startup.dry_run import outlook_lines, outlook_of  # noqa: PLC0415

        log_to_stderr()
        click.echo(printable("\n".join(outlook_lines(settings, outlook_of(settings)))))
