"""`ropewalk serve [MODEL]`: the port answers first, then everything heavy is imported."""

from typing import Any

import click

from ropewalk.model_runtime.loading.hub.local_model import is_hub_id, is_there
from ropewalk.server.process.hangups import end_process
from ropewalk.server.sentences import DIED, sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import SECTIONS, ServeSettings, load_settings
from ropewalk.server.settings.sections import DeploymentSettings
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
            from ropewalk.server.ray.serving import serve_on_ray  # noqa: PLC0415  # Ray is an extra

            serve_on_ray(settings, keys, teller)
            return
        has_died = serve_model(settings, keys, stated, teller)
    if has_died:
        end_process(DIED)  # on a broken GPU torch's destructors may abort, with another code


_NAMING = ("deployments", "model_aliases")  # settings that name deployments


def _refuse_before_listening(settings: ServeSettings) -> None:
    """Raise what can be told before the port opens, if there may be something.

    The look takes 0.2 s. The servers on Ray have models of their own.
    """
    model, stated = settings.model, settings.model_fields_set
    is_absent = model is not None and not is_hub_id(model) and not is_there(model)
    names_some = not stated.isdisjoint({*DeploymentSettings.model_fields, *_NAMING})
    if settings.replicas is None and (is_absent or names_some):
        from ropewalk.server.startup.planning.dry_run import refuse_before_listening  # noqa: PLC0415

        refuse_before_listening(settings)
