"""Loading of all settings from flags, environment, file and defaults.

The command line overrides the environment (`ROPEWALK_<NAME>`). The environment overrides the file,
and the file overrides the default.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.settings.config_file import ConfigFileError, read_config_file
from server.settings.request_sections import (
    AccessSettings,
    GrammarSettings,
    HttpSettings,
    LimitSettings,
)
from server.settings.sections import (
    CacheSettings,
    DeploymentSettings,
    ModelSettings,
    SourceSettings,
)

_ENV_PREFIX = "ROPEWALK_"
TRACEBACK_VARIABLE = f"{_ENV_PREFIX}TRACEBACK"  # not a setting; it is read when an error is printed


class SettingsError(ValueError):
    """A setting with an unusable value; the message names setting and value."""


class ServeSettings(
    SourceSettings,
    ModelSettings,
    DeploymentSettings,
    CacheSettings,
    HttpSettings,
    AccessSettings,
    LimitSettings,
    GrammarSettings,
    BaseSettings,
):
    """The settings of `ropewalk serve`."""

    model_config = SettingsConfigDict(env_prefix=_ENV_PREFIX, extra="forbid", frozen=True)


_CACHE_SIZES = {"kv_cache_gib", "kv_cache_tokens"}


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{_ENV_PREFIX}{name.upper()}"


def load_settings(flags: Mapping[str, Any]) -> ServeSettings:
    """Load settings from given flags, environment and file. Raises SettingsError."""
    _refuse_unknown_variables()
    path = flags.get("config") or os.environ.get(variable_of("config"))
    in_file = {} if path is None else _file_values(Path(path))
    stated = set(flags) | {name for name in in_file if variable_of(name) in os.environ}
    if any(name in stated or variable_of(name) in os.environ for name in _CACHE_SIZES):
        stated |= _CACHE_SIZES  # either one overrides both values of the file
    unstated = {name: value for name, value in in_file.items() if name not in stated}
    try:
        settings = ServeSettings(**{**unstated, **flags})
    except ValidationError as error:
        raise SettingsError(_sentences(error, flags, path)) from error
    _refuse_contradictions(settings)
    return settings


def _file_values(path: Path) -> dict[str, Any]:
    try:
        found = read_config_file(path)
    except ConfigFileError as error:
        raise SettingsError(str(error)) from error
    known = set(ServeSettings.model_fields) - {"config"}
    for name in found:
        if name not in known:
            raise SettingsError(f"{name} in {path} is no setting of ropewalk{_like(name, known)}")
    return found


def _refuse_unknown_variables() -> None:
    known = {variable_of(name) for name in ServeSettings.model_fields} | {TRACEBACK_VARIABLE}
    for name in sorted(os.environ):
        if name.upper().startswith(_ENV_PREFIX) and name not in known:
            raise SettingsError(
                f"{name} in the environment is no setting of ropewalk{_like(name, known)}"
            )


def _like(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; {close[0]} is" if close else ""


def _refuse_contradictions(settings: ServeSettings) -> None:
    """Refuse contradictions between several settings. Raises SettingsError."""
    if settings.kv_cache_gib is not None and settings.kv_cache_tokens is not None:
        raise SettingsError("kv_cache_gib and kv_cache_tokens both size the cache: give one")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise SettingsError(
            f"max_num_batched_tokens must be >= max_num_seqs ({settings.max_num_seqs}), got "
            f"{settings.max_num_batched_tokens}"
        )
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        raise SettingsError("ssl_keyfile needs ssl_certfile")
    if settings.deployments is None:
        return
    for name in ("served_model_name", *DeploymentSettings.model_fields):
        if getattr(settings, name) is not None:
            raise SettingsError(
                f"{name} and deployments exclude each other: each of the deployments has its own, "
                f"got {getattr(settings, name)!r}"
            )
    names = [entry.name for entry in settings.deployments]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"deployments: name must be given once, got {name!r} twice")


def _sentences(error: ValidationError, flags: Mapping[str, Any], path: object) -> str:
    """Return a line per invalid setting: its name, the accepted values, its value and source."""
    lines = []
    for each in error.errors(include_url=False):
        top = str(each["loc"][0])
        name = ".".join(str(part) for part in each["loc"])
        problem = each["msg"].removeprefix("Value error, ")
        problem = problem[0].lower() + problem[1:]
        variable = variable_of(top)
        origin = str(path)
        if top in flags:
            origin = "the command line"
        elif variable in os.environ:
            origin = variable
        lines.append(f"{name}: {problem}, got {each['input']!r} (from {origin})")
    return "\n".join(lines)
