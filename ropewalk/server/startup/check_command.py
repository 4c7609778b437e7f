"""`ropewalk config check [MODEL or FILE]`: what would be served, without weights."""

from pathlib import Path
from typing import Any

import click

from ropewalk.server.process.triton_needs import refuse_without_needs
from ropewalk.server.sentences import sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import SECTIONS, load_settings
from ropewalk.server.startup.gate import Problems, checked
from ropewalk.server.wording import printable

_SETTINGS_FILES = (".yaml", ".yml")


@click.command(cls=SettingsCommand)
@click.argument("model", metavar="[MODEL|FILE]", required=False)
@with_flags(*SECTIONS)
def check(model: str | None, **flags: Any) -> None:
    """Show what `ropewalk serve` would serve here, without loading weights.

    MODEL is a folder, a GGUF file or a hub id, and FILE a YAML file of settings, as in --config.
    The output lists deployments, tiers, the longest context and memory. Flags override variables
    of the environment, and these the file. If the server would refuse to start, the exit code is 2,
    and a sentence gives the reason.
    """
    stated = given(flags)
    if model is not None:
        is_file = model.endswith(_SETTINGS_FILES) or _is_plain_file(model)
        if is_file and "config" in stated:
            raise click.UsageError(f"name one FILE: {model} or --config {stated['config']}")
        stated["config" if is_file else "model"] = model
    elif not stated:
        raise click.UsageError("name a MODEL or a FILE, as in `config check FILE`")
    with sentences():
        settings = load_settings(stated)
        problems = Problems()
        problems.tried(lambda: checked(settings))
        # Imported here, so that a wrong setting does not wait for it.
        from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415
        from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of  # noqa: PLC0415

        log_to_stderr()
        outlook = problems.tried(lambda: outlook_of(settings))
        if outlook is not None:
            device = outlook.outline.device
            problems.tried(lambda: refuse_without_needs(device))
        problems.refuse()
        assert outlook is not None, "it was made without a problem"
        click.echo(printable("\n".join(outlook_lines(settings, outlook))))


def _is_plain_file(source: str) -> bool:
    return Path(source).is_file() and not source.endswith(".gguf")
