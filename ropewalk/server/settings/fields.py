"""Declaration of settings, and parsing of their values from text or YAML's own types."""

import itertools
import json
import re
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import NoDecode

from ropewalk.model_runtime.sampling_limits import INT64, SAMPLING_LIMITS, Limit
from ropewalk.rope import ROPE_TYPES
from ropewalk.server.strict_json import TwiceError, object_of


def setting(
    default: Any, text: str, *, unit: str = "", flags: Collection[str] = (), **limits: Any
) -> Any:
    """Declare a setting. `unit` is its value's unit or format, shown in help and docs.

    `flags`: those of vLLM, SGLang and llama.cpp that mean the same.
    """
    extra: dict[str, Any] = {"unit": unit, "flags": list(flags)}
    return Field(default, description=text, json_schema_extra=extra, **limits)


def unit_of(field: Any) -> str:
    return str((field.json_schema_extra or {}).get("unit", ""))


def flags_of(name: str, field: Any) -> list[str]:
    """Return the flags of a setting: its own, then those of other servers.

    MODEL is an argument, so it has none of its own.
    """
    own = [] if name == "model" else [f"--{name.replace('_', '-')}"]
    return [*own, *(field.json_schema_extra or {}).get("flags", ())]


class _Switch:
    """A boolean where no switch stands: no type accepts it, and messages show it as YAML does."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on

    def __repr__(self) -> str:
        return "true" if self.is_on else "false"


class Section(BaseModel):
    """Settings that belong together; its docstring is their heading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for a number, because Python treats true and false as numbers."""
        if cls.model_fields[str(info.field_name)].annotation is bool:
            return value
        if isinstance(value, list):
            return [_Switch(is_on=item) if isinstance(item, bool) else item for item in value]
        return _Switch(is_on=value) if isinstance(value, bool) else value


def _split(value: Any) -> Any:
    """Split `1,2,4,8`, the format in a flag or an environment variable."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",")) if value.strip() else ()


def _not_empty(value: Any) -> Any:
    """Refuse an empty text: a variable that is unset where it is used would open the server."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("must hold a key, leave it out for a server without keys")
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=object_of)
    except TwiceError as error:
        raise ValueError(f"must have each key once ({error.name!r} is given twice)") from error
    except json.JSONDecodeError as error:
        if value in (*ROPE_TYPES, "none"):  # llama.cpp's --rope-scaling
            told = 'must be a JSON object, such as {"rope_type": "yarn", "factor": 4.0}'
            raise ValueError(told) from error
        raise ValueError(f"must be JSON (the mistake is at character {error.pos + 1})") from error


def _host_names(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value != "*" and not re.fullmatch(
            r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", value
        ):
            raise ValueError(
                "must be names without scheme, port and path, as llm.example.org or *.example.org, "
                "or *"
            )
    return values


def _device(value: str) -> str:
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", value):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


def _store_address(value: str) -> str:
    from ropewalk.model_runtime.engine.kv_disk.stores.store_url import (  # noqa: PLC0415  # rare
        parse_store_url,
    )

    parse_store_url(value)
    return value


def _rising(values: tuple[float, ...]) -> tuple[float, ...]:
    if any(low >= high for low, high in itertools.pairwise(values)) or not values or values[0] < 1:
        raise ValueError("must rise strictly from 1 or more")
    return values


def _generation_defaults(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuse fields and values that no request can have as a default."""
    limits = {**SAMPLING_LIMITS, "max_new_tokens": Limit(1, INT64, is_integer=True)}
    problems = [
        f"{name} must be {limits[name]}"
        if name in limits
        else f"{name} is not one of its fields, which are {', '.join(limits)}"
        for name, given in (value or {}).items()
        if name not in limits or not limits[name].admits(given)
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return value


def _off(value: Any) -> Any:
    """Return `off` where YAML 1.1 has read a boolean from it."""
    return "off" if isinstance(value, _Switch) and not value.is_on else value


def other_words(**words: str) -> BeforeValidator:
    """Build a validator that reads each of `words` as the word that it stands for."""
    return BeforeValidator(
        lambda value: words.get(value, value) if isinstance(value, str) else value
    )


FromJson = BeforeValidator(_from_json)
OffIsAWord = BeforeValidator(_off)
Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    NoDecode,
    BeforeValidator(_split),
    AfterValidator(_rising),
]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Keys = Annotated[Names, BeforeValidator(_not_empty)]
HostNames = Annotated[Names, AfterValidator(_host_names)]
StoreAddress = Annotated[str, AfterValidator(_store_address)]
Device = Annotated[str, AfterValidator(_device)]
# Around the whole union: inside of it pydantic-settings reads a variable by its own json.loads.
JsonObject = Annotated[dict[str, Any] | None, NoDecode, FromJson]
GenerationDefaults = Annotated[JsonObject, AfterValidator(_generation_defaults)]
