"""`ropewalk config check FILE`: what would be served, without weights."""

import click

from server.sentences import sentences
from server.settings.load import load_settings


@click.command()
@click.argument("file")
def check(file: str) -> None:
    """Say what `ropewalk serve --config FILE` would serve here; loads no weights.

    Deployments, tiers, longest context and memory, with the environment's settings on top of the
    file's. Ends with code 2 and a sentence where it would refuse to start.
    """
    with sentences():
        settings = load_settings({"config": file})
        # Imported here, so that a wrong key does not wait for it.
        from server.startup.dry_run import outlook_lines, outlook_of  # noqa: PLC0415

        click.echo("\n".join(outlook_lines(settings, outlook_of(settings))))
