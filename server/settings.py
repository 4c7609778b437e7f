"""Every setting once: its name with unit, its default, its help. Flags and environment follow.

The command line beats the environment (`ROPEWALK_<NAME>`), which beats the default.
"""

import itertools
import json
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rope import POLICIES, ROPE_TYPES, Policy
from server.metrics import MAX_CONTEXT_BUCKETS

_ENV_PREFIX = "ROPEWALK_"


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message names setting and value."""


def _numbers(value: Any) -> Any:
    """`1,2,4,8` as a flag or an environment variable gives it."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def _json_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error


def _rising(values: tuple[float, ...]) -> tuple[float, ...]:
    if any(low >= high for low, high in itertools.pairwise(values)) or not values or values[0] < 1:
        raise ValueError("must rise strictly from 1 or more")
    return values


Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    NoDecode,
    BeforeValidator(_numbers),
    AfterValidator(_rising),
]
Integers = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_numbers), AfterValidator(_rising)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_numbers)]
JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_json_object)]


class ServeSettings(BaseSettings):
    """The settings of `ropewalk serve`."""

    model_config = SettingsConfigDict(env_prefix=_ENV_PREFIX, extra="forbid", frozen=True)

    model: str | None = Field(
        None, description="Model folder or hub id. Left out: the embedded demonstration model."
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="The name clients use. Left out: the folder's or the hub id's last part.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")

    rope_scaling: JsonObject | None = Field(
        None,
        description="Hugging Face's rope block as JSON: how to rescale beyond the trained length. "
        'Left out: {"rope_type": "yarn", "factor": 4.0}, or the checkpoint\'s own block.',
    )
    rope_policy: Policy | None = Field(
        None,
        description=f"What decides a request's tier: one of {', '.join(POLICIES)}. Left out: "
        "pinned, or fixed for a checkpoint that carries scaling.",
    )
    rope_tiers: Numbers | None = Field(
        None,
        description="Tier ceilings as multiples of the trained length, rising from 1, as 1,2,4,8. "
        "Left out: powers of two up to the factor.",
    )
    allowed_rope_types: Names | None = Field(
        None,
        description=f"Methods that a request may ask for: any of {','.join(ROPE_TYPES)}. Left "
        "out: all that the model can use.",
    )
    max_rope_factor: float | None = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="Largest factor that a request may ask for. Left out: the longest tier's.",
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest context in tokens. Left out: the longest tier, or what the cache "
        "holds if that is less. Larger than the cache: refuses to start.",
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number type of weights and cache; auto: float32 on a CPU, else the "
        "checkpoint's.",
    )  # fmt: skip
    device: str = Field(
        "auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    threads: int | None = Field(
        None, ge=1, le=512, description="CPU threads for computing. Left out: torch's choice."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the checkpoint."
    )

    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Size of the KV cache in GiB. Left out: a quarter of the memory (of a GPU: 80 "
        "percent of what is free), but no more than max_num_seqs longest contexts.",
    )
    kv_cache_tokens: int | None = Field(
        None, ge=1, description="Size of the KV cache in tokens, instead of kv_cache_gib."
    )
    page_size: int = Field(16, ge=4, le=256, description="Tokens in a page of the KV cache.")
    max_num_seqs: int = Field(32, ge=1, le=4096, description="Sequences served at once.")
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        description="Tokens computed in one step: one for each sequence that decodes, the rest "
        "for chunks of prompts.",
    )
    max_num_logit_rows: int = Field(
        256,
        ge=1,
        description="Prompt positions in one step whose logprobs were asked for; bounds memory.",
    )
    max_queued_requests: int = Field(
        256, ge=0, description="Requests that may wait for a place; one more is answered 429."
    )
    context_buckets: Integers | None = Field(
        None,
        max_length=MAX_CONTEXT_BUCKETS - 1,
        description="Upper bounds in tokens of the metrics' context_bucket label, at most 11. Left "
        "out: fractions and multiples of the trained length.",
    )


def load_settings(flags: dict[str, Any]) -> ServeSettings:
    """Settings from flags (given ones only) and the environment. Raises SettingsError."""
    _refuse_unknown_variables()
    try:
        settings = ServeSettings(**flags)
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from error
    if settings.kv_cache_gib is not None and settings.kv_cache_tokens is not None:
        raise SettingsError("kv_cache_gib and kv_cache_tokens both size the cache: give one")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise SettingsError(
            f"max_num_batched_tokens must be >= max_num_seqs ({settings.max_num_seqs}), got "
            f"{settings.max_num_batched_tokens}"
        )
    return settings


def _refuse_unknown_variables() -> None:
    known = {_ENV_PREFIX + name.upper() for name in ServeSettings.model_fields}
    unknown = sorted(
        name for name in os.environ if name.startswith(_ENV_PREFIX) and name not in known
    )
    if unknown:
        raise SettingsError(f"{unknown[0]} in the environment is no setting of ropewalk")


def _sentence(error: ValidationError) -> str:
    """One line per wrong setting: its name, what is accepted, what it was."""
    lines = []
    for each in error.errors(include_url=False):
        name = ".".join(str(part) for part in each["loc"])
        problem = each["msg"].removeprefix("Value error, ")
        problem = problem[0].lower() + problem[1:]
        lines.append(f"{name}: {problem}, got {each['input']!r}")
    return "\n".join(lines)
