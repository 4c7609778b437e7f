"""`ropewalk config check FILE`: what would be served, without weights."""

import click

from ropewalk.server.sentences import sentences
from ropewalk.server.settings.flags import SettingsCommand
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.gate import Problems, checked
from ropewalk.server.wording import printable


@click.command(cls=SettingsCommand)
@click.argument("file", required=False)
@click.option("--config", "named", metavar="FILE", help="FILE, as `serve` and `doctor` take it.")
def check(file: str | None, named: str | None) -> None:
    """Show what `ropewalk serve --config FILE` would serve here, without loading weights.

    The output lists deployments, tiers, the longest context and memory. Variables of the
    environment override the file. If the server would refuse to start, the exit code is 2, and a
    sentence gives the reason.
    """
    if (file is None) == (named is None):
        raise click.UsageError(
            "name one FILE, as `config check FILE` or `config check --config FILE`"
        )
    with sentences():
        settings = load_settings({"config": named if file is None else file})
        problems = Problems()
        problems.tried(lambda: checked(settings))
        # Imported here, so that a wrong setting does not wait for it.
        from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415
        from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of  # noqa: PLC0415

        log_to_stderr()
        outlook = problems.tried(lambda: outlook_of(settings))
        problems.refuse()
        assert outlook is not None, "it was made without a problem"
        click.echo(printable("\n".join(outlook_lines(settings, outlook))))
