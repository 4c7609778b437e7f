"""Declaration of settings, and parsing of their values from text or YAML's own types."""

import json
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
)

from ropewalk.model_runtime.sampling_limits import INT64, SAMPLING_LIMITS, Limit
from ropewalk.rope import ROPE_TYPES
from ropewalk.server.strict_json import TwiceError, object_of


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

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Parse the format of a value in a flag or an environment variable."""
        field = cls.model_fields[str(info.field_name)]
        if not isinstance(value, str):
            return value if field.annotation is bool else _without_switches(value)
        if unit_of(field) == "JSON":
            return _from_json(value)
        return _split(value) if _is_list(field.annotation) else value


def _is_list(annotation: Any) -> bool:
    """Return whether values are lists of names or numbers, or None."""
    return any(get_origin(each) is tuple for each in (annotation, *get_args(annotation)))


def _without_switches(value: Any) -> Any:
    """Refuse a boolean for a number, because Python treats true and false as numbers."""
    if isinstance(value, list):
        return [_without_switches(item) for item in value]
    return _Switch(is_on=value) if isinstance(value, bool) else value


def _split(value: str) -> tuple[str, ...]:
    """Split `1,2,4,8`."""
    return tuple(part.strip() for part in value.split(",")) if value.strip() else ()


def _from_json(value: str) -> Any:
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


OffIsAWord = BeforeValidator(_off)
Names = tuple[str, ...]
HostNames = Annotated[Names, AfterValidator(_host_names)]
StoreAddress = Annotated[str, AfterValidator(_store_address)]
Device = Annotated[str, AfterValidator(_device)]
GenerationDefaults = Annotated[dict[str, Any] | None, AfterValidator(_generation_defaults)]
