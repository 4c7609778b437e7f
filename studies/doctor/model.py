"""Check of the model: its config, tokenizer, weight files, and whether it fits the memory.

No weights are loaded here; load.py does that.
"""

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.planning.dry_run import outlook_of
from ropewalk.server.startup.planning.serving_plan import model_name
from ropewalk.studies.doctor.finding import Finding

_NOT_LOADED = "; not loaded: --load loads it, runs the self-check and one completion"


def check_model(settings: ServeSettings, *, is_loaded_next: bool) -> Finding:
    """Plan the model's serving as `config check` does, without weights."""
    try:
        outlook = outlook_of(settings)
    except (ModelError, SettingsError) as error:
        return Finding("fail", "model", str(error))
    outline, plan = outlook.outline, outlook.plan
    weights = "weights not downloaded yet"
    if outlook.num_weight_bytes is not None:
        weights = f"{size_text(outlook.num_weight_bytes)} of weights"
    longest = max(each.max_len for each in plan.deployments)
    dtype = str(outline.dtype).removeprefix("torch.")
    warning = "" if outlook.template_problem is None else f"; {outlook.template_problem}"
    return Finding(
        "warn" if warning else "ok",
        "model",
        f"{model_name(settings)}: {outline.architecture}, {outline.device}, {dtype}, {weights}, "
        f"{outline.native().native_len} tokens trained, {longest} served{warning}"
        + ("" if is_loaded_next else _NOT_LOADED),
        outlook.advice or "",
    )
