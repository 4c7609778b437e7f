"""Declaration of settings, and parsing of their values from text or YAML's own types."""

import itertools
import json
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

MAX_CONTEXT_BUCKETS = 12  # with +Inf; each one adds a whole histogram per metric


def setting(default: Any, text: str, *, unit: str = "", **limits: Any) -> Any:
    """Declare a setting. `unit` is its value's unit or format, shown in help and docs."""
    return Field(default, description=text, json_schema_extra={"unit": unit}, **limits)


def unit_of(field: Any) -> str:
    """Return the unit of a declared setting."""
    return str((field.json_schema_extra or {}).get("unit", ""))


class Section(BaseModel):
    """Settings that belong together; its docstring is their heading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a boolean for a number, because Python treats true and false as numbers."""
        is_switch = cls.model_fields[str(info.field_name)].annotation is bool
        if isinstance(value, bool) and not is_switch:
            raise ValueError("is a switch's value")
        return value


def _split(value: Any) -> Any:
    """Split `1,2,4,8`, the format in a flag or an environment variable."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",")) if value.strip() else ()


def _from_json(value: Any) -> Any:
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


FromJson = BeforeValidator(_from_json)
Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    NoDecode,
    BeforeValidator(_split),
    AfterValidator(_rising),
]
Integers = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_split), AfterValidator(_rising)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
JsonObject = Annotated[dict[str, Any], NoDecode, FromJson]
