"""`ropewalk config check [MODEL or FILE]`: what would be served, without weights or loaded."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ropewalk.server.sentences import Teller, sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import SECTIONS, ServeSettings, SettingsError, load_settings
from ropewalk.server.startup.gate import Problems, checked
from ropewalk.server.startup.progress import LoadingProgress
from ropewalk.server.wording import printable

if TYPE_CHECKING:
    from ropewalk.server.startup.load_service import LoadedModel

_PROMPT, _NUM_TOKENS = "Hello", 8
_SETTINGS_FILES = (".yaml", ".yml")


@click.command(cls=SettingsCommand)
@click.argument("model", metavar="[MODEL|FILE]", required=False)
@click.option(
    "--load",
    is_flag=True,
    help="Load the model as `serve` does, run the self-check and one completion.",
)
@click.option(
    "--gpu-memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Plan for a GPU with so much memory, which need not be here.",
)
@with_flags(*SECTIONS)
def check(
    model: str | None, *, load: bool, gpu_memory_gib: float | None = None, **flags: Any
) -> None:
    """Show what `ropewalk serve` would serve here. Weights are loaded for --load only.

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
    with sentences() as teller:
        settings = load_settings(stated)
        if load and gpu_memory_gib is not None:
            raise click.UsageError("--gpu-memory-gib plans only, and --load loads")
        gpu_bytes = None if gpu_memory_gib is None else int(gpu_memory_gib * 2**30)
        lines = check_lines(settings, teller, loads=load, gpu_bytes=gpu_bytes)
        click.echo(printable("\n".join(lines)))


def check_lines(
    settings: ServeSettings, teller: Teller, *, loads: bool, gpu_bytes: int | None = None
) -> list[str]:
    """Return what would be served: read up to the weights, or loaded, checked and asked.

    `gpu_bytes`: the memory of a GPU to plan for; None: the device that is here.
    Raises ModelError or SettingsError as `serve` does, with a line for each problem.
    """
    problems = Problems()
    problems.tried(lambda: checked(settings))
    teller.tell_of_imports()
    # Imported here, so that a wrong setting does not wait for it.
    from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415
    from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of  # noqa: PLC0415

    log_to_stderr()
    outlook = problems.tried(lambda: outlook_of(settings, gpu_bytes))
    problems.refuse()
    assert outlook is not None, "it was made without a problem"
    return _loaded_lines(settings, teller) if loads else outlook_lines(settings, outlook, gpu_bytes)


def _loaded_lines(settings: ServeSettings, teller: Teller) -> list[str]:
    """Return the banner of the loaded model and one answer. No port is opened."""
    if settings.replicas is not None:
        raise SettingsError("--load is for a model in this process: remove replicas")
    from ropewalk.server.startup.load_service import load_served  # noqa: PLC0415  # seconds

    progress = LoadingProgress(teller.say)
    progress.watch_compiler()
    loaded = load_served(settings, progress.enter, progress.downloaded)
    try:
        progress.finish()
        return [loaded.served.banner, f"  completion       {_PROMPT} {_completion(loaded)}"]
    finally:
        if loaded.ranks is not None:
            loaded.ranks.close()


def _completion(loaded: "LoadedModel") -> str:
    """Allocate the cache and answer one greedy request. Raises what `serve` meets there."""
    from ropewalk.model_runtime.deployments.deployment import RopeRequest  # noqa: PLC0415
    from ropewalk.model_runtime.request import (  # noqa: PLC0415
        FinishReason,
        Request,
        SamplingParams,
    )
    from ropewalk.server.metrics import MetricFactory  # noqa: PLC0415
    from ropewalk.server.startup.load_service import metrics_of  # noqa: PLC0415

    plan = loaded.served.plan
    engine = loaded.engine(metrics_of(MetricFactory(), plan))
    engine.start()
    try:
        deployment = plan.deployments[0]
        ids = loaded.checkpoint.tokenizer.encode(_PROMPT)[: deployment.max_len]
        num_tokens = min(_NUM_TOKENS, deployment.max_len - len(ids) + 1)
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        tier_choice = deployment.choose(RopeRequest(), len(ids), num_tokens)
        (outputs,) = engine.generate([Request("check", tuple(ids), sampling, tier_choice)])
    finally:
        engine.stop()
    if outputs[-1].finish_reason is FinishReason.ERROR:
        raise RuntimeError(outputs[-1].error or "the engine failed")
    return json.dumps("".join(each.text for each in outputs), ensure_ascii=False)


def _is_plain_file(source: str) -> bool:
    return Path(source).is_file() and not source.endswith(".gguf")
