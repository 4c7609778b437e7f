"""A strict JSON body, which reports all of its problems at once.

A number in quotes is not a number. NaN and Infinity are refused everywhere. A field is used or
refused, never ignored. A field of null is a field left out, whether this server knows it or not.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from ropewalk.server.settings.foreign_fields import REAL_FIELDS, written_instead
from ropewalk.server.wording import did_you_mean

# Unknown fields, or entries of an object, that are reported: a million of errors take seconds.
_MAX_NAMES = 10
_MAX_NAME = 64  # characters of an unknown field's name in the error message
_PIECE = 16384  # items; checking them takes a millisecond
_OTHER_KIND = "other_kind"
MAX_DEPTH = 64  # of JSON inside a text, as by default of a body


def unusable(param: str, problem: str) -> PydanticCustomError:
    """Build an error of one field that only a check of the whole body can find."""
    return _of_field("unusable", param, problem)


def given(value: Any) -> str:
    """Return `. Given:` with a short value in JSON, to follow the words of a problem."""
    if isinstance(value, list | dict):
        return f". Given: {'a list' if isinstance(value, list) else 'an object'}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return ". Given: an integer of more than 20 digits"
    if isinstance(value, str) and len(value) > _MAX_NAME:
        return f". Given: {json.dumps(value[:_MAX_NAME])}..."
    return f". Given: {json.dumps(value)}"


def is_too_deep(value: Any) -> bool:
    """Return whether a JSON value is nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def other_kind(param: str, problem: str) -> PydanticCustomError:
    """Build an error of an object of another kind, whose other fields are then not looked at."""
    return _of_field(_OTHER_KIND, param, problem)


def only_type(value: Any, served: str, others: str) -> Any:
    """Refuse other types before a field that only they have is reported as unknown.

    A missing type passes, and so does null. Raises PydanticCustomError with `others`, words for
    what is refused.
    """
    if isinstance(value, dict) and value.get("type") not in (None, served):
        told = f"must be {served}; {others} are not supported"
        raise other_kind("type", told + given(value.get("type")))
    return value


def _of_field(kind: str, param: str, problem: str) -> PydanticCustomError:
    # A client's name may be invalid Unicode, which pydantic cannot store.
    told = param.encode("utf-8", "backslashreplace").decode()
    return PydanticCustomError(kind, problem, {"param": told})


class Body(BaseModel):
    """A strict, frozen JSON object.

    The text below a field describes it in /openapi.json and docs/reference/api.md. A string, a
    number and a free object need an example, too; others have one by their type.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        use_attribute_docstrings=True,
    )
    # OpenAI's fields that are accepted only with values that have no effect.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    instead: ClassVar[Mapping[str, str]] = {}  # words for the fields to use instead of others
    known: ClassVar[frozenset[str]] = frozenset()  # names of the fields in JSON

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the object and its neutral fields; any other field may be null."""
        schema = handler(core_schema)
        found = handler.resolve_ref_schema(schema)
        found["additionalProperties"] = {"type": "null"}
        for name, field in found["properties"].items():
            if name in cls.neutral:
                found["properties"][name] = cls._described_neutral(name)
            elif "description" in field:
                field["description"] = " ".join(field["description"].split())
        return schema

    @classmethod
    def _described_neutral(cls, name: str) -> JsonSchemaValue:
        """Return the schema of a field that is accepted at values without effect only."""
        values = [value for value in cls.neutral[name] if value is not None]
        told = " or ".join(json.dumps(value) for value in values)
        instead = cls.instead.get(name)
        only = (
            f"Accepted only as {told}, which has no effect." if told else "Accepted only as null."
        )
        return {
            "enum": [*values, None],
            "description": f"{only} Use {instead}." if instead else only,
            "examples": values[:1] or [None],
            "default": None,
        }

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Keep the names of the fields, which every body is compared with."""
        cls.known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a field and its problem for each conflict between valid fields."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_all_problems(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report unknown fields and wrong values together, which pydantic would do more slowly."""
        problems: list[tuple[str, str]] = []
        if isinstance(value, dict) and not value.keys() <= cls.known:
            # Clients write null for what they leave out, also in fields of other servers.
            value = {
                key: each for key, each in value.items() if each is not None or key in cls.known
            }
        if isinstance(value, dict) and (cls.neutral or not value.keys() <= cls.known):
            problems += cls._problems_of_names(value)
            if problems:
                refused = {name for name, _ in problems}
                kept = cls.known - refused
                value = {name: value[name] for name in kept & value.keys()}
        try:
            body = handler(value)
        except ValidationError as error:
            # An error of a part says nothing about the other fields, one of this body does.
            is_other = any(
                each["type"] == _OTHER_KIND and not each["loc"] for each in error.errors()
            )
            if not problems or is_other:
                raise
            raise _joined(cls.__name__, error, problems) from None
        problems += body.conflicts()
        if problems:
            raise _joined(cls.__name__, None, problems)
        return body

    @classmethod
    def _problems_of_names(cls, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the fields that are neutral with another value, then some that are unknown."""
        for name, values in cls.neutral.items():
            if name in value and value[name] not in values:
                yield name, cls._instead_of(name) or _not_served(values, value[name])
        if not value.keys() <= cls.known:
            for name in islice((name for name in value if name not in cls.known), _MAX_NAMES):
                hint = "" if name in REAL_FIELDS else did_you_mean(name, cls.known)
                told = f"is not a field of this body, remove it{hint and '.'}{hint}"
                yield name[:_MAX_NAME], cls._instead_of(name) or told

    @classmethod
    def _instead_of(cls, name: str) -> str | None:
        """Return the words for a field that another one replaces; None if none does."""
        instead = cls.instead.get(name) or written_instead(name, cls.known)
        return f"is not supported, use {instead}" if instead else None


def _not_served(values: tuple[Any, ...], value: Any) -> str:
    """Return the words for a value other than those that have no effect."""
    served = [json.dumps(each) for each in values if each not in (None, [], "")]
    if not served:
        return "is not supported, remove it"
    words = json.dumps(value) if isinstance(value, list) else ""
    told = f". Given: {words}" if 0 < len(words) <= _MAX_NAME else given(value)
    return f"must be {' or '.join(served)}, or left out{told}"


def _joined(
    title: str, error: ValidationError | None, problems: list[tuple[str, str]]
) -> ValidationError:
    lines = [] if error is None else _details(error)
    lines += [InitErrorDetails(type=unusable(*each), input=None) for each in problems]
    return ValidationError.from_exception_data(title, lines)


def _details(error: ValidationError) -> list[InitErrorDetails]:
    """Return pydantic's problems in the format that makes another error of them."""
    return [
        InitErrorDetails(
            type=PydanticCustomError(each["type"], each["msg"], each.get("ctx")),
            loc=each["loc"],
            input=each["input"],
        )
        for each in error.errors(include_url=False)
    ]


def _first_mistakes(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Report the mistakes of a list's first wrong items, where `handler` stops at each of them."""
    try:
        return handler(value)
    except ValidationError as error:
        if not isinstance(value, list) or not all(each["loc"] for each in error.errors()):
            raise
        lines, start = _shifted(error, 0)
        title = error.title
    while len(lines) < _MAX_NAMES and start < len(value):
        try:
            handler(value[start : start + _PIECE])
            start += _PIECE
        except ValidationError as error:
            if not all(each["loc"] for each in error.errors()):
                break  # a limit of the whole list, which its rest does not tell
            more, start = _shifted(error, start)
            lines += more
    raise ValidationError.from_exception_data(title, lines)


def _shifted(error: ValidationError, start: int) -> tuple[list[InitErrorDetails], int]:
    """Return the problems of a list without its first items, and the index behind the first one."""
    lines = _details(error)
    for line in lines:
        line["loc"] = (start + int(line["loc"][0]), *line["loc"][1:])
    return lines, int(lines[0]["loc"][0]) + 1


# Beside `fail_fast`: a list whose mistakes are reported together, as far as there are few.
FirstMistakes = WrapValidator(_first_mistakes)


def _in_pieces(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a list in pieces; a million items at once would stop other threads for 60 ms."""
    if not isinstance(value, list) or len(value) <= _PIECE:
        return handler(value)
    for start in range(0, len(value), _PIECE):
        try:
            handler(value[start : start + _PIECE])
        except ValidationError as error:
            lines, _ = _shifted(error, start)
            raise ValidationError.from_exception_data(error.title, lines) from None
    return value


# Behind FirstMistakes, for a list that may be as long as its body.
InPieces = WrapValidator(_in_pieces)


@dataclass(frozen=True, slots=True)
class Few:
    """A limit of an object's entries that reports few of its mistakes."""

    most: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check the number before the entries, because a million of errors take seconds."""
        inner = handler(source)
        return core_schema.no_info_wrap_validator_function(self._check, inner)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "maxProperties": self.most}

    def _check(self, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, dict) and len(value) > self.most:
            told = {"most": self.most, "given": len(value)}
            raise PydanticCustomError("too_many", "must have at most {most} entries", told)
        try:
            return handler(value)
        except ValidationError:
            if not isinstance(value, dict):
                raise
            wrong = (item for item in value.items() if _is_refused(dict([item]), handler))
            handler(dict(islice(wrong, _MAX_NAMES)))
            raise


def _is_refused(value: Mapping[str, Any], handler: ValidatorFunctionWrapHandler) -> bool:
    try:
        handler(value)
    except ValidationError:
        return True
    return False


def is_none(value: object) -> bool:
    return value is None
