"""The cache format that `config check` and `doctor` suggest if a context does not fit."""

from collections.abc import Callable, Iterator

from ropewalk.model_runtime.attention.sealed.page_format import EXACT, FORMATS, ROUNDED
from ropewalk.model_runtime.errors import ModelError
from ropewalk.server.settings.load import ServeSettings, SettingsError, format_contradictions
from ropewalk.server.startup.planning.serving_plan import ServingPlan

_BY_LOSS = (EXACT, ROUNDED, *FORMATS)  # the smallest first
_FEWER_SEQUENCES = (8, 1)  # each has an open page


def format_advice(
    settings: ServeSettings,
    wanted: int,
    held: int,
    plan_of: Callable[[ServeSettings], ServingPlan],
) -> str | None:
    """Return the format with the smallest loss that holds a context, and the setting to write.

    `wanted`: the tokens of the context. `held`: those that these settings hold, 0 if they are
    refused. `plan_of` plans for changed settings, and raises SettingsError or ModelError where a
    load would. None: no format that is served here holds more, or kv_cache_tokens is too small.
    """
    most, best = held, None
    for changed in _candidates(settings):
        try:
            plan = plan_of(changed)
        except (SettingsError, ModelError):
            continue
        name = changed.kv_cache_dtype
        if name == ROUNDED != settings.kv_cache_dtype and not plan.rounds:  # it is the same as auto
            continue
        longest = _longest(plan)
        if longest >= wanted:
            return f"a context of {wanted} tokens fits with {_written(settings, changed)}"
        if longest > most:
            most, best = longest, changed
    if best is None or settings.kv_cache_tokens is not None:  # tokens of any format
        return None
    return (
        f"no format holds a context of {wanted} tokens: {_written(settings, best)} holds {most}; "
        "lower max_model_len or raise kv_cache_gib"
    )


def _longest(plan: ServingPlan) -> int:
    return max(each.max_len for each in plan.deployments)


def _candidates(settings: ServeSettings) -> Iterator[ServeSettings]:
    """Yield the settings in formats of more loss, then the same with fewer sequences."""
    from_here = _BY_LOSS[_BY_LOSS.index(settings.kv_cache_dtype) :]
    stated = settings.max_num_seqs
    fewer = (num for num in _FEWER_SEQUENCES if stated is None or num < stated)
    for max_num_seqs in (stated, *fewer):
        # With as many sequences, these settings are those that do not hold it.
        for name in from_here[max_num_seqs == stated :]:
            changes = {"kv_cache_dtype": name, "max_num_seqs": max_num_seqs}
            changed = settings.model_copy(update=changes)
            if not any(format_contradictions(changed)):
                yield changed


def _written(settings: ServeSettings, changed: ServeSettings) -> str:
    """Return the settings that differ, as a file of settings has them."""
    names = ("kv_cache_dtype", "max_num_seqs")
    values = {name: getattr(changed, name) for name in names}
    differing = (name for name in names if values[name] != getattr(settings, name))
    return " and ".join(f"{name}: {values[name]}" for name in differing)
