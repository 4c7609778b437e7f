"""The fields of structured answers: the form, its schema and its whitespace."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ropewalk.model_runtime.text.grammar import ANY_OBJECT
from ropewalk.model_runtime.text.text_rules import choice_rule, regex_rule
from ropewalk.model_runtime.text.whitespace import ANY, NONE, checked_whitespace
from ropewalk.server.api.strict_body import MAX_DEPTH, Body, FirstMistakes, is_too_deep

# The example of each field with a schema.
SCHEMA_EXAMPLE = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


class JsonSchemaField(Body):
    """OpenAI's `json_schema`. Name and description change nothing; every schema is strict here."""

    name: str = Field(min_length=1, max_length=64, examples=["answer"])
    """A name without effect."""
    schema_: dict[str, Any] = Field(alias="schema", examples=[SCHEMA_EXAMPLE])
    """The JSON schema that the answer satisfies (docs/reference/api.md#structured-answers). At most
    65536 bytes."""
    strict: bool | None = None
    """Without effect: every schema is strict."""
    description: str | None = Field(None, max_length=4096, examples=["A colour."])
    """A description without effect."""


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    """`text` is any text, `json_object` any JSON object, and `json_schema` JSON that satisfies a
    schema."""
    json_schema: JsonSchemaField | None = None
    """The schema of the type `json_schema`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the schema's problem if it is there without its type, or the other way round."""
        if self.json_schema is None and self.type == "json_schema":
            yield "json_schema", "is missing: `type` is json_schema"
        if self.json_schema is not None and self.type != "json_schema":
            yield "json_schema", f"needs `type` json_schema. Given: {self.type}"

    @property
    def schema_asked(self) -> Mapping[str, Any] | None:
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


def _parsed_schema(value: Any) -> Any:
    """Return the schema of a text of JSON, which vLLM accepts beside an object."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
        is_deep = isinstance(schema, dict) and is_too_deep(schema)
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise ValueError("must be a JSON schema, as an object or as text") from error
    if is_deep:
        raise ValueError(f"must be a JSON schema, nested at most {MAX_DEPTH} deep")
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema, as an object or as text")  # noqa: TRY004  # pydantic reports a ValueError
    return schema


SchemaOrText = Annotated[
    dict[str, Any],
    BeforeValidator(_parsed_schema, json_schema_input_type=dict[str, Any] | str),
]
Regex = Annotated[str, Field(min_length=1, max_length=65_536)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=65_536)]],
    Field(min_length=1, max_length=1024, fail_fast=True),
    FirstMistakes,
]


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """The form that a request asks of its answer's text."""

    field: str  # that asks for it
    schema: Mapping[str, Any] | None = None  # of JSON that the text has to be
    rule: str | None = None  # in llguidance's form of Lark, of a text that is no JSON

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | None) -> "AskedAnswer | None":
        """Return what a `response_format` asks; None: any text is valid."""
        return None if schema is None else cls("response_format", schema)


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one form of the answer, and the whitespace of JSON."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "disable_fallback": (None, False),
        "disable_additional_properties": (None, False),
    }
    instead: ClassVar[Mapping[str, str]] = {
        "grammar": "`regex`, or `json` with a schema",
        "structural_tag": "`json` with a schema",
    }

    json_: SchemaOrText | None = Field(None, alias="json", examples=[SCHEMA_EXAMPLE])
    """The answer is JSON that satisfies this schema, which is an object or its text."""
    regex: Regex | None = Field(None, examples=["[0-9]{5}"])
    """The answer is a text that this regular expression matches as a whole."""
    choice: Choices | None = Field(None, examples=[["yes", "no"]])
    """The answer is one of these texts."""
    json_object: bool | None = None
    """With true, the answer is a JSON object."""
    whitespace_pattern: Annotated[str, AfterValidator(checked_whitespace)] | None = Field(
        None, examples=["[ ]?"]
    )
    """A bounded regular expression of at most 64 characters for the whitespace in one place of
    JSON. The parts are spaces, `\\t`, `\\n`, `\\r`, classes, groups, `?` and bounds such as
    `{0,4}`. Default: `[ ]?`."""
    disable_any_whitespace: bool | None = None
    """With true, JSON has no whitespace. With false, one place contains up to 32 characters of any
    whitespace of JSON."""
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.whitespace_pattern is not None and self.disable_any_whitespace is not None:
            yield "disable_any_whitespace", "and `whitespace_pattern` exclude each other"

    @property
    def whitespace_asked(self) -> str | None:
        """Return the pattern of the whitespace in one place; None: the server's own."""
        if self.disable_any_whitespace is None:
            return self.whitespace_pattern
        return NONE if self.disable_any_whitespace else ANY


_NO_OUTPUTS = StructuredOutputs()


class AnswerFields(Body):
    """The fields that ask for a form of the answer, of which a request has one at most."""

    # vLLM's older names without a counterpart of the same name.
    instead: ClassVar[Mapping[str, str]] = {
        "guided_grammar": "`guided_regex`, or `response_format` with a JSON schema",
        "guided_whitespace_pattern": "`structured_outputs` with `whitespace_pattern`",
    }

    response_format: ResponseFormat | None = None
    """The format of the answer (docs/reference/api.md#structured-answers)."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer, and the whitespace of JSON (vLLM's field)."""
    guided_json: SchemaOrText | None = Field(None, examples=[SCHEMA_EXAMPLE])
    """The same as `json` of `structured_outputs` (vLLM's older name)."""
    guided_regex: Regex | None = Field(None, examples=["[0-9]{5}"])
    """The same as `regex` of `structured_outputs` (vLLM's older name). Look-around and
    back-references get 400."""
    guided_choice: Choices | None = Field(None, examples=[["yes", "no"]])
    """The same as `choice` of `structured_outputs` (vLLM's older name)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a second form, and whitespace without JSON."""
        asked = self._forms
        for each in asked[1:]:
            if each.field == asked[0].field:
                yield each.field, f"must have one form at most. Given: {len(asked)}"
                break
            yield each.field, f"and `{asked[0].field}` exclude each other"
        given = self.structured_outputs
        has_whitespace = given is not None and bool(
            given.whitespace_pattern is not None or given.disable_any_whitespace
        )
        if has_whitespace and not any(each.schema is not None for each in asked):
            yield "structured_outputs", "has whitespace of JSON, and needs a form of JSON"

    @property
    def asked_answer(self) -> AskedAnswer | None:
        """Return the form of the answer; None: any text is valid."""
        return next(iter(self._forms), None)

    @property
    def whitespace_asked(self) -> str | None:
        given = self.structured_outputs
        return None if given is None else given.whitespace_asked

    @cached_property
    def _forms(self) -> tuple[AskedAnswer, ...]:
        return tuple(self._asked())

    def _asked(self) -> Iterator[AskedAnswer]:
        if self.response_format is not None and self.response_format.schema_asked is not None:
            yield AskedAnswer("response_format", self.response_format.schema_asked)
        outputs = self.structured_outputs or _NO_OUTPUTS
        for field, schema, regex, choices in (
            ("structured_outputs", outputs.json_, outputs.regex, outputs.choice),
            ("guided_json", self.guided_json, None, None),
            ("guided_regex", None, self.guided_regex, None),
            ("guided_choice", None, None, self.guided_choice),
        ):
            if schema is not None:
                yield AskedAnswer(field, schema)
            if regex is not None:
                yield AskedAnswer(field, rule=regex_rule(regex))
            if choices is not None:
                yield AskedAnswer(field, rule=choice_rule(choices))
        if outputs.json_object:
            yield AskedAnswer("structured_outputs", ANY_OBJECT)
