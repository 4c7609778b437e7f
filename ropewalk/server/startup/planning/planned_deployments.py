"""The deployments that settings list, and the lengths that a cache leaves them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.rope import NativeRope, Profile, RopeConfigError
from ropewalk.server.settings.load import ServeSettings, SettingsError

EMBEDDED_NAME = "ropewalk-demo"
_EMBEDDED_SCALING = {"rope_type": "yarn", "factor": 8.0}  # trained on 256 tokens, alive to 2,048


def model_name(settings: ServeSettings) -> str:
    """Return the name of the settings' model: the given one, or that of its folder or hub id."""
    if settings.served_model_name is not None:
        return settings.served_model_name
    if settings.model is None:
        return EMBEDDED_NAME
    folder = Path(settings.model)
    if folder.suffix == ".gguf":
        return folder.stem
    return (folder.resolve() if folder.is_dir() else folder).name


def plan_deployments(settings: ServeSettings, native: NativeRope) -> tuple[Deployment, ...]:
    """Build the deployments, regardless of the available memory. Raises SettingsError."""
    planned = []
    problems = []
    for name, stated in _stated(settings).items():
        try:
            planned.append(_deployment(settings, name, stated, native))
        except SettingsError as error:
            problems.append(str(error))
    problems += _problems_of_aliases(settings.model_aliases or {}, settings)
    if problems:
        raise SettingsError("\n".join(problems))
    return tuple(planned)


def _problems_of_aliases(aliases: Mapping[str, str], settings: ServeSettings) -> Iterator[str]:
    """Yield what is wrong with each alias."""
    names = list(_stated(settings))
    for alias, name in aliases.items():
        if alias in names:
            yield f"model_aliases: {alias!a} is a deployment, and cannot be another one's alias"
        elif name not in names:
            yield f"model_aliases: {alias!a} must name one of {', '.join(names)}; got {name!a}"


def within_cache(
    settings: ServeSettings, deployments: Iterable[Deployment], config: EngineConfig
) -> tuple[Deployment, ...]:
    """Return the fitted deployments.

    Raises SettingsError if a max_model_len of the settings is larger than the cache.
    """
    fitting = fitted(deployments, config)
    problems = [
        f"{_prefix(settings, name)}max_model_len must be <= the size of the KV cache "
        f"({config.longest_context} tokens), got {stated.max_model_len}"
        f"{_needed(deployment, config)}"
        for (name, stated), deployment in zip(_stated(settings).items(), fitting, strict=True)
        if stated.max_model_len is not None and stated.max_model_len > deployment.max_len
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    return fitting


def fitted(deployments: Iterable[Deployment], config: EngineConfig) -> tuple[Deployment, ...]:
    """Return the deployments with requests no longer than the cache of this config holds."""
    return tuple(
        each.within_cache(
            config.longest_context,
            num_step_tokens=_step_tokens(config),
            room=config.room_beside_windows,
        )
        for each in deployments
    )


def most_pages_held(deployments: Iterable[Deployment], config: EngineConfig) -> int:
    """Return the most pages that a sequence of any deployment holds at a time."""

    def held(deployment: Deployment) -> int:
        kept = deployment.num_kept
        most = None if kept is None else -(-(kept + _step_tokens(config)) // config.page_size)
        return config.num_held_pages(deployment.max_len, most)

    return max(map(held, deployments))


def _step_tokens(config: EngineConfig) -> int:
    """Return the most positions that a step adds to the pages of a request that releases some."""
    return config.max_num_batched_tokens + 4 * config.page_size


def _needed(deployment: Deployment, config: EngineConfig) -> str:
    """Return a clause with the cache that any length needs; empty if requests keep all pages."""
    kept, method = deployment.num_kept, deployment.position_method
    if kept is None or method is None:
        return ""
    return (
        f"; {method.method} needs {kept + _step_tokens(config)} tokens for any length: {kept} "
        f"that it keeps, {config.max_num_batched_tokens} of a step (max_num_batched_tokens) and "
        f"four pages{_windows_beside(config)}"
    )


def _windows_beside(config: EngineConfig) -> str:
    """Return a clause with the pages of windows; empty if none are held."""
    step = config.page_size, config.max_num_batched_tokens
    num_pages = config.page_groups.window_pages(*step)
    return f", beside {num_pages} pages of the layers with a window" if num_pages else ""


def profiles_of(deployments: Iterable[Deployment]) -> tuple[Profile, ...]:
    """Return the profiles that the deployments' own tiers and position methods need, each once."""
    return tuple(
        {
            tier.profile: None
            for each in deployments
            for tiers in (
                each.own_tiers,
                *(each.tiers[name].ascending for name in each.position_methods),
            )
            for tier in tiers
        }
    )


def num_profiles(deployments: Iterable[Deployment]) -> int:
    """Return the number of profiles that requests may have, with the methods they may name."""
    of_methods = (tiers for each in deployments for tiers in each.tiers.values())
    return len({tier.profile for own in of_methods for tier in (*own.ascending, *own.exact)})


def _stated(settings: ServeSettings) -> dict[str, DeploymentOptions]:
    """Return the settings of each deployment by its name: those listed, or the only one."""
    if settings.deployments is None:
        return {model_name(settings): settings}
    return {entry.name: entry for entry in settings.deployments}


def _deployment(
    settings: ServeSettings, name: str, stated: DeploymentOptions, native: NativeRope
) -> Deployment:
    if settings.model is None and stated.rope_scaling is None and stated.rope_tiers is None:
        stated = stated.model_copy(update={"rope_scaling": _EMBEDDED_SCALING})
    try:
        return make_deployment(name, native, stated, settings.page_size)
    except RopeConfigError as error:
        inside = "" if error.field in DeploymentOptions.model_fields else "rope_scaling: "
        raise SettingsError(f"{_prefix(settings, name)}{inside}{error}") from error


def _prefix(settings: ServeSettings, name: str) -> str:
    """Return the start of an error message, which names the deployment if they are listed."""
    return "" if settings.deployments is None else f"deployments: {name}: "
