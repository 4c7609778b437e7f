"""`ropewalk serve [MODEL]`: the port answers first, then everything heavy is imported."""

from typing import Any

import click

from ropewalk.model_runtime.loading.hub.local_model import is_hub_id, local_model
from ropewalk.model_runtime.loading.hub.wanted import Wanted
from ropewalk.server.process.hangups import end_process
from ropewalk.server.sentences import DIED, sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import SECTIONS, ServeSettings, load_settings
from ropewalk.server.startup.gate import checked
from ropewalk.server.startup.start import serve_model


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@with_flags(*SECTIONS)
def serve(**flags: Any) -> None:
    """Serve MODEL: a folder, a GGUF file or a hub id. Default: the embedded model.

    OpenAI's routes are under /v1, metrics under /metrics. Every flag is also an environment
    variable, named in brackets, and a key of the YAML file. For MODEL they are ROPEWALK_MODEL and
    `model`. A flag overrides the variable, and a variable overrides the file.
    """
    import structlog  # noqa: PLC0415  # the help of this command needs none

    from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415

    with sentences() as teller:
        stated = given(flags)
        settings = load_settings(stated)
        log_to_stderr(settings.log_format, settings.log_level)
        if settings.log_format == "json":
            teller.use_json(structlog.get_logger(__name__))
        # Errors of named files are reported before anything is imported.
        keys = checked(settings)
        _refuse_before_listening(settings)
        if settings.replicas is not None:
            from ropewalk.server.ray.command import serve_on_ray  # noqa: PLC0415  # Ray is an extra

            serve_on_ray(settings, keys, teller)
            return
        has_died = serve_model(settings, keys, stated, teller)
    if has_died:
        end_process(DIED)  # on a broken GPU torch's destructors may abort, with another code


def _refuse_before_listening(settings: ServeSettings) -> None:
    """Raise ModelError for a model that is not there. The servers on Ray have their own models."""
    model = settings.model
    if model is not None and settings.replicas is None and not is_hub_id(model):
        local_model(model, Wanted(weights=True, code=False), settings.revision)
