"""The strict JSON object that every body is, and checks of single fields.

The bodies are strict: a number in quotes is not a number. NaN and Infinity are refused everywhere.
A field is used or refused, never ignored.
"""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

_MAX_NAME = 64  # characters of an unknown field's name in the error message


def unusable(param: str, problem: str) -> PydanticCustomError:
    """Build an error of one field that only a check of the whole body can find."""
    # A client's name may be invalid Unicode, which pydantic cannot store.
    told = param.encode("utf-8", "backslashreplace").decode()
    return PydanticCustomError("unusable", problem, {"param": told})


class Body(BaseModel):
    """A strict, frozen JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    # OpenAI's fields that are accepted only with values that have no effect.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, value: Any) -> Any:
        """Report the first one only: an error for each of a million would block the event loop."""
        if isinstance(value, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in value if name not in known), None)
            if unknown is not None:
                name = str(unknown)[:_MAX_NAME]
                meant = "".join(difflib.get_close_matches(name, known, 1))
                hint = f"; `{meant}` is one" if meant else ""
                raise unusable(name, f"is not a field of this body, remove it{hint}")
        return value

    @model_validator(mode="after")
    def _only_neutral_values(self) -> Self:
        for name, values in self.neutral.items():
            if getattr(self, name) not in values:
                raise unusable(name, "is not supported, remove it")
        return self


def few(most: int) -> BeforeValidator:
    """Build a validator that refuses an object of more than `most` fields unread."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError(
                "too_many", "must have at most {most} entries", {"most": most, "given": len(value)}
            )
        return value

    return BeforeValidator(check)


def is_none(value: object) -> bool:
    """Return whether a field has no value and is left out of the body."""
    return value is None
