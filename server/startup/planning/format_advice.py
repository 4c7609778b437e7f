"""The cache format that `config check` and `doctor` suggest if a context does not fit."""

from collections.abc import Callable, Iterator

from ropewalk.model_runtime.attention.sealed.page_format import EXACT, FORMATS, ROUNDED
from ropewalk.model_runtime.errors import ModelError
from ropewalk.server.settings.load import ServeSettings, SettingsError, format_contradictions
from ropewalk.server.startup.serving_plan import ServingPlan

_BY_LOSS = (EXACT, ROUNDED, *FORMATS)  # the smallest first
_FEWER_SEQUENCES = (8, 1)  # each has an open page


def format_advice(
    settings: ServeSettings, wanted: int, plan_of: Callable[[ServeSettings], ServingPlan]
) -> str | None:
    """Return the format with the smallest loss that holds a context, and the setting to write.

    `wanted`: the tokens of the context. `plan_of` plans for changed settings, and raises
    SettingsError or ModelError where a load would. None: no format is served here.
    """
    most, best = 0, None
    for changed in _candidates(settings):
        try:
            plan = plan_of(changed)
        except (SettingsError, ModelError):
            continue
        longest = _longest(plan)
        if longest >= wanted:
            return f"a context of {wanted} tokens fits with {_written(settings, changed)}"
        if longest > most:
            most, best = longest, changed
    if best is None:
        return None
    return (
        f"no format holds a context of {wanted} tokens: {_written(settings, best)} holds {most}; "
        "lower max_model_len or raise kv_cache_gib"
    )


def _longest(plan: ServingPlan) -> int:
    return max(each.max_len for each in plan.deployments)


def _candidates(settings: ServeSettings) -> Iterator[ServeSettings]:
    """Yield the settings in formats of more loss, then the same with fewer sequences."""
    lossier = _BY_LOSS[_BY_LOSS.index(settings.kv_cache_dtype) + 1 :]
    fewer = (num for num in _FEWER_SEQUENCES if num < settings.max_num_seqs)
    for max_num_seqs in (settings.max_num_seqs, *fewer):
        for name in lossier:
            changes = {"kv_cache_dtype": name, "max_num_seqs": max_num_seqs}
            changed = settings.model_copy(update=changes)
            if not any(format_contradictions(changed)):
                yield changed


def _written(settings: ServeSettings, changed: ServeSettings) -> str:
    """Return the settings that differ, as a file of settings has them."""
    text = f"kv_cache_dtype: {changed.kv_cache_dtype}"
    if changed.max_num_seqs != settings.max_num_seqs:
        text += f" and max_num_seqs: {changed.max_num_seqs}"
    return text
