"""Loading of all settings from flags, environment, file and defaults.

The command line overrides the environment (`ROPEWALK_<NAME>`). The environment overrides the file,
and the file overrides the default.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ropewalk.model_runtime.attention.quantised.page_format import EXACT, quantises
from ropewalk.model_runtime.config import PAGE_UNIT, lower_store_setting
from ropewalk.model_runtime.loading.hub.local_model import is_hub_id
from ropewalk.server.settings.config_file import ConfigFileError, read_config_file, why_unreadable
from ropewalk.server.settings.fields import Section
from ropewalk.server.settings.problems import (
    ENV_PREFIX,
    Sources,
    unknown_setting,
    value_problems,
    variable_of,
)
from ropewalk.server.settings.request_sections import (
    AccessSettings,
    HttpSettings,
    LimitSettings,
    LogSettings,
    ReplicaSettings,
)
from ropewalk.server.settings.sections import (
    CacheSettings,
    DeploymentSettings,
    ModelSettings,
    ParallelSettings,
    SourceSettings,
)

TRACEBACK_VARIABLE = f"{ENV_PREFIX}TRACEBACK"  # not a setting; it is read when an error is printed


class SettingsError(ValueError):
    """A setting with an unusable value; the message names setting and value."""


class ServeSettings(
    SourceSettings,
    ModelSettings,
    DeploymentSettings,
    CacheSettings,
    ParallelSettings,
    HttpSettings,
    AccessSettings,
    LogSettings,
    LimitSettings,
    ReplicaSettings,
    BaseSettings,
):
    """The settings of `ropewalk serve`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, enable_decoding=False)


# In the order of help and docs/reference/settings.md.
SECTIONS = tuple(each for each in ServeSettings.__bases__ if issubclass(each, Section))

_WORD = re.compile("[a-z_]+")
_CACHE_SIZES = {"kv_cache_gib", "kv_cache_tokens"}
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def load_settings(flags: Mapping[str, Any]) -> ServeSettings:
    """Load settings from given flags, environment and file. Raises SettingsError."""
    problems = _unknown_variables()
    path = flags.get("config") or os.environ.get(variable_of("config"))
    in_file = {} if path is None else _file_values(Path(path))
    problems += _unknown_in_file(in_file, path)
    stated = set(flags) | {name for name in in_file if variable_of(name) in os.environ}
    if any(name in stated or variable_of(name) in os.environ for name in _CACHE_SIZES):
        stated |= _CACHE_SIZES  # either one overrides both values of the file
    unstated = {
        name: value
        for name, value in in_file.items()
        if name in ServeSettings.model_fields and name not in stated
    }
    values = {**unstated, **_of_vllm(), **flags}
    wrong = set[str]()
    try:
        settings = ServeSettings(**values)
    except ValidationError as error:
        problems += value_problems(error, Sources(flags, in_file, path))
        wrong = {str(each["loc"][0]) for each in error.errors(include_url=False)}
        # With their defaults, so that contradictions between the others are told, too.
        defaults = {name: ServeSettings.model_fields[name].default for name in wrong}
        settings = ServeSettings(**{**values, **defaults})
        if "deployments" in wrong:  # one that is wrong excludes the others' settings all the same
            problems += _beside_deployments(settings)
    problems += [told for told in _contradictions(settings) if not wrong & set(_WORD.findall(told))]
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def _file_values(path: Path) -> dict[str, Any]:
    try:
        return read_config_file(path)
    except ConfigFileError as error:
        raise SettingsError(str(error)) from error


def _unknown_in_file(in_file: Mapping[str, Any], path: object) -> list[str]:
    """Return a sentence per key of the file that is no setting for a file."""
    known = set(ServeSettings.model_fields) - {"config"}
    problems = [
        unknown_setting(name, path, known)
        for name in in_file
        if name not in known and name != "config"
    ]
    if "config" in in_file:
        problems.append(f"config in {path} must be removed: a file cannot name another one")
    return problems


def _unknown_variables() -> list[str]:
    """Return a sentence per variable with our prefix that is no setting."""
    known = {variable_of(name) for name in ServeSettings.model_fields} | {TRACEBACK_VARIABLE}
    return [
        unknown_setting(name, "the environment", known)
        for name in sorted(os.environ)
        if name.upper().startswith(ENV_PREFIX) and name not in known
    ]


def _of_vllm() -> dict[str, bool]:
    """Return what vLLM's variable sets, if ours does not."""
    value = os.environ.get(_BATCH_INVARIANT)
    if value is None or variable_of("exact_batches") in os.environ:
        return {}
    return {"exact_batches": value not in {"", "0"}}


def _model_contradictions(settings: ServeSettings) -> Iterator[str]:
    """Yield a sentence for each contradiction between the settings that name the model."""
    if settings.gguf_file is not None and settings.model is None:
        yield f"gguf_file needs the folder of a model, and none is named, got {settings.gguf_file}"
    if settings.revision is not None and not (settings.model and is_hub_id(settings.model)):
        named = "the embedded model" if settings.model is None else f"the path {settings.model}"
        yield f"revision is for a model by hub id, and {named} has none, got {settings.revision!r}"


def _contradictions(settings: ServeSettings) -> Iterator[str]:
    """Yield a sentence for each contradiction between several settings."""
    if settings.kv_cache_gib is not None and settings.kv_cache_tokens is not None:
        yield "kv_cache_gib and kv_cache_tokens both size the cache: give one"
    yield from _disk_contradictions(settings)
    yield from format_contradictions(settings)
    num_tokens = settings.max_num_batched_tokens
    if num_tokens is not None and num_tokens < (settings.max_num_seqs or 1):
        yield (
            f"max_num_batched_tokens must be >= max_num_seqs ({settings.max_num_seqs}), got "
            f"{num_tokens}"
        )
    if num_tokens is not None and num_tokens <= (settings.max_draft_tokens or 0):
        yield (
            f"max_num_batched_tokens must be > max_draft_tokens ({settings.max_draft_tokens}), got "
            f"{num_tokens}"
        )
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        yield "ssl_keyfile needs ssl_certfile"
    if settings.router_only and settings.router_key is None:
        yield "router_only needs router_key"
    yield from _model_contradictions(settings)
    yield from _key_contradictions(settings)
    yield from _replica_contradictions(settings)
    if settings.deployments is None:
        return
    yield from _beside_deployments(settings)
    yield from _names_given_again("deployments", [entry.name for entry in settings.deployments])


def _beside_deployments(settings: ServeSettings) -> Iterator[str]:
    """Yield a sentence for each setting that deployments have, beside a list of them."""
    for name in ("served_model_name", *DeploymentSettings.model_fields):
        if getattr(settings, name) is not None:
            yield (
                f"{name} and deployments exclude each other: each of the deployments has its own, "
                f"got {getattr(settings, name)!r}"
            )


def _disk_contradictions(settings: ServeSettings) -> Iterator[str]:
    """Yield a sentence for each contradiction between the settings of pages on disk."""
    if settings.kv_disk is not None and settings.kv_disk_gib is None:
        yield f"kv_disk needs kv_disk_gib, the size of the folder, got {settings.kv_disk}"
    if settings.kv_disk is None and settings.kv_disk_gib is not None:
        yield f"kv_disk_gib needs kv_disk, the folder, got {settings.kv_disk_gib:g}"
    if settings.kv_disk is not None and settings.kv_store is not None:
        yield f"kv_disk and kv_store exclude each other, got {settings.kv_disk} and a store"
    name = lower_store_setting(settings)
    if name is not None and settings.tensor_parallel_size > 1:
        yield (
            f"{name} is for a model in one process, because each rank has a part of a page: "
            f"tensor_parallel_size must be 1, got {settings.tensor_parallel_size}"
        )


def format_contradictions(settings: ServeSettings) -> Iterator[str]:
    """Yield a sentence for each contradiction with a cache in other numbers."""
    name = settings.kv_cache_dtype
    if name == EXACT:
        return
    if quantises(name) and settings.page_size % PAGE_UNIT:
        yield (
            f"page_size must be a multiple of {PAGE_UNIT} for kv_cache_dtype {name}, got "
            f"{settings.page_size}"
        )
    if settings.tensor_parallel_size > 1:
        yield (
            f"kv_cache_dtype {name} is for a model in one process: tensor_parallel_size must be 1, "
            f"got {settings.tensor_parallel_size}"
        )


def _key_contradictions(settings: ServeSettings) -> Iterator[str]:
    """Yield a sentence for each contradiction between the bounds of keys."""
    yield from _names_given_again("keys", [entry.name for entry in settings.keys or ()])


def _replica_contradictions(settings: ServeSettings) -> Iterator[str]:
    """Yield a sentence for each contradiction between the settings of replicas."""
    if settings.replicas is None:
        if settings.max_replicas is not None:
            yield f"max_replicas needs replicas, got {settings.max_replicas}"
        return
    if settings.router_only or settings.router_key is not None:
        yield (
            "router_key and router_only are for servers behind `ropewalk route`, and with replicas "
            f"the command is the router: give them or replicas, got {settings.replicas} replicas"
        )
    if settings.max_replicas is not None and settings.max_replicas < settings.replicas:
        yield (
            f"max_replicas must be >= replicas ({settings.replicas}), got {settings.max_replicas}"
        )


def _names_given_again(setting: str, names: list[str]) -> Iterator[str]:
    """Yield a sentence for each name that stands in a list more than once."""
    for name, count in Counter(names).items():
        if count > 1:
            times = "twice" if count == 2 else f"{count} times"
            yield f"{setting}: name must be given once, got {name!r} {times}"


def read_named(setting: str, path: Path, encoding: str = "utf-8") -> str:
    """Return the text of the file that a setting names. Raises SettingsError."""
    try:
        return path.read_text(encoding=encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{setting}: cannot read {path}: {why_unreadable(error)}") from error


def chat_template_text(settings: ServeSettings) -> str | None:
    """Return the operator's chat template; None if none is named. Raises SettingsError."""
    if settings.chat_template is None:
        return None
    return read_named("chat_template", settings.chat_template)
