"""Every setting once: its name, unit, default and help. Flags, environment and file follow.

The command line beats the environment (`ROPEWALK_<NAME>`), which beats the file, which beats the
default.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rope import POLICIES, ROPE_TYPES, Policy
from server.config_file import ConfigFileError, read_config_file
from server.metrics import MAX_CONTEXT_BUCKETS
from server.setting_types import FromJson, Integers, JsonObject, Names, Numbers, Section, setting

_ENV_PREFIX = "ROPEWALK_"


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message names setting and value."""


class ModelSettings(Section):
    """Model"""  # noqa: D400  # a heading

    model: str | None = setting(
        None,
        "Model folder or hub id. Left out: the embedded demonstration model.",
        unit="path or id",
        min_length=1,
    )
    served_model_name: str | None = setting(
        None,
        "The name clients use. Left out: the folder's or the hub id's last part.",
        unit="name",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Number type of weights and cache: auto, float32, bfloat16 or float16; auto is float32 on "
        "a CPU, else the checkpoint's.",
        unit="name",
    )
    device: str = setting(
        "auto",
        "auto, cpu, cuda or cuda:N.",
        unit="name",
        pattern="^(auto|cpu|cuda(:[0-9]+)?)$",
    )
    threads: int | None = setting(
        None,
        "CPU threads for computing. Left out: torch's choice.",
        unit="threads",
        ge=1,
        le=512,
    )
    trust_remote_code: bool = setting(
        default=False,
        text="Run Python code that comes with the checkpoint.",
        unit="switch",
    )
    chat_template: Path | None = setting(
        None,
        "Jinja file that turns messages into a prompt. Left out: the tokenizer's own, or a plain "
        "transcript where it has none.",
        unit="path",
    )
    allowed_chat_template_kwargs: Names = setting(
        ("enable_thinking", "thinking", "reasoning_effort"),
        "Variables of the chat template that requests may set.",
        unit="names",
    )


class DeploymentSettings(Section):
    """Deployment"""  # noqa: D400  # a heading

    rope_scaling: JsonObject | None = setting(
        None,
        "Hugging Face's rope block: how to rescale beyond the trained length. Left out: "
        '{"rope_type": "yarn", "factor": 4.0}, or the checkpoint\'s own block.',
        unit="JSON",
    )
    rope_policy: Policy | None = setting(
        None,
        f"What decides a request's tier: one of {', '.join(POLICIES)}. Left out: pinned, or fixed "
        "for a checkpoint that carries scaling.",
        unit="name",
    )
    rope_tiers: Numbers | None = setting(
        None,
        "Tier ceilings as multiples of the trained length, rising from 1, as 1,2,4,8. Left out: "
        "powers of two up to the factor.",
        unit="multiples",
    )
    allowed_rope_types: Names | None = setting(
        None,
        f"Methods that a request may ask for: any of {','.join(ROPE_TYPES)}. Left out: all that "
        "the model can use.",
        unit="names",
    )
    max_rope_factor: float | None = setting(
        None,
        "Largest factor that a request may ask for. Left out: the longest tier's.",
        unit="factor",
        ge=1,
        allow_inf_nan=False,
    )
    max_model_len: int | None = setting(
        None,
        "Longest context. Left out: the longest tier, or what the cache holds if that is less. "
        "Larger than the cache: refuses to start.",
        unit="tokens",
        ge=1,
    )
    answer_reserve_tokens: int | None = setting(
        None,
        "Room for an answer whose chat request names no max_tokens: its tier covers the prompt "
        "and this. Left out: an eighth of the trained length.",
        unit="tokens",
        ge=1,
    )


class DeploymentEntry(DeploymentSettings):
    """One of several served names."""

    name: str = Field(min_length=1)


class CacheSettings(Section):
    """Cache and scheduling"""  # noqa: D400  # a heading

    kv_cache_gib: float | None = setting(
        None,
        "Size of the KV cache. Left out: a quarter of the memory (of a GPU: 80 percent of what is "
        "free), but no more than max_num_seqs longest contexts.",
        unit="GiB",
        gt=0,
        allow_inf_nan=False,
    )
    kv_cache_tokens: int | None = setting(
        None, "Size of the KV cache, instead of kv_cache_gib.", unit="tokens", ge=1
    )
    page_size: int = setting(16, "A page of the KV cache.", unit="tokens", ge=4, le=256)
    max_num_seqs: int = setting(32, "Sequences served at once.", unit="sequences", ge=1, le=4096)
    max_num_batched_tokens: int = setting(
        512,
        "Computed in one step: one token for each sequence that decodes, the rest for chunks of "
        "prompts.",
        unit="tokens",
        ge=1,
    )
    max_num_logit_rows: int = setting(
        256,
        "Prompt positions in one step whose logprobs were asked for; bounds memory.",
        unit="positions",
        ge=1,
    )
    max_queued_requests: int = setting(
        256,
        "Requests that may wait for a place; one more is answered 429.",
        unit="requests",
        ge=0,
    )


class HttpSettings(Section):
    """HTTP and metrics"""  # noqa: D400  # a heading

    host: str = setting("127.0.0.1", "Address to listen on.", unit="address")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", unit="port", ge=0, le=65535)
    sse_keep_alive_seconds: float = setting(
        15.0,
        "Silence in a stream before a comment keeps proxies from closing it; 0: never.",
        unit="seconds",
        ge=0,
        allow_inf_nan=False,
    )
    context_buckets: Integers | None = setting(
        None,
        "Upper bounds of the metrics' context_bucket label, at most 11. Left out: fractions and "
        "multiples of the trained length.",
        unit="tokens",
        max_length=MAX_CONTEXT_BUCKETS - 1,
    )


class GrammarSettings(Section):
    """Structured answers"""  # noqa: D400  # a heading

    max_schema_bytes: int = setting(
        65_536, "Largest JSON schema of a request's response_format.", unit="bytes", ge=2
    )
    grammar_compile_seconds: float = setting(
        5.0,
        "A schema that takes longer to compile is answered 400.",
        unit="seconds",
        ge=0.1,
        le=600,
        allow_inf_nan=False,
    )


class SourceSettings(Section):
    """Configuration"""  # noqa: D400  # a heading

    config: Path | None = setting(
        None,
        "YAML file of settings, by their names with underscores. Not a setting of the file itself.",
        unit="path",
    )
    deployments: Annotated[tuple[DeploymentEntry, ...], NoDecode, FromJson] | None = setting(
        None,
        "Several names over one set of weights and one cache: a list of objects with a name and "
        "the settings under Deployment.",
        unit="JSON",
        min_length=1,
        max_length=16,
    )


# In the order of help and docs/settings.md.
SECTIONS: tuple[type[Section], ...] = (
    SourceSettings,
    ModelSettings,
    DeploymentSettings,
    CacheSettings,
    HttpSettings,
    GrammarSettings,
)


class ServeSettings(
    SourceSettings,
    ModelSettings,
    DeploymentSettings,
    CacheSettings,
    HttpSettings,
    GrammarSettings,
    BaseSettings,
):
    """The settings of `ropewalk serve`."""

    model_config = SettingsConfigDict(env_prefix=_ENV_PREFIX, extra="forbid", frozen=True)


_CACHE_SIZES = {"kv_cache_gib", "kv_cache_tokens"}


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"{_ENV_PREFIX}{name.upper()}"


def load_settings(flags: Mapping[str, Any]) -> ServeSettings:
    """Settings from flags (given ones only), environment and file. Raises SettingsError."""
    _refuse_unknown_variables()
    path = flags.get("config") or os.environ.get(variable_of("config"))
    in_file = {} if path is None else _file_values(Path(path))
    stated = set(flags) | {name for name in in_file if variable_of(name) in os.environ}
    if any(name in stated or variable_of(name) in os.environ for name in _CACHE_SIZES):
        stated |= _CACHE_SIZES  # either takes the place of the file's
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
    known = {variable_of(name) for name in ServeSettings.model_fields}
    for name in sorted(os.environ):
        if name.upper().startswith(_ENV_PREFIX) and name not in known:
            raise SettingsError(
                f"{name} in the environment is no setting of ropewalk{_like(name, known)}"
            )


def _like(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; {close[0]} is" if close else ""


def _refuse_contradictions(settings: ServeSettings) -> None:
    """What only several settings together show."""
    if settings.kv_cache_gib is not None and settings.kv_cache_tokens is not None:
        raise SettingsError("kv_cache_gib and kv_cache_tokens both size the cache: give one")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise SettingsError(
            f"max_num_batched_tokens must be >= max_num_seqs ({settings.max_num_seqs}), got "
            f"{settings.max_num_batched_tokens}"
        )
    if settings.deployments is None:
        return
    for name in ("served_model_name", *DeploymentSettings.model_fields):
        if getattr(settings, name) is not None:
            raise SettingsError(
                f"{name} and deployments exclude another: each of the deployments has its own, "
                f"got {getattr(settings, name)!r}"
            )
    names = [entry.name for entry in settings.deployments]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"deployments: name must be given once, got {name!r} twice")


def _sentences(error: ValidationError, flags: Mapping[str, Any], path: object) -> str:
    """One line per wrong setting: its name, what is accepted, what it was, where it came from."""
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
