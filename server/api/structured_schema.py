"""The fields of structured answers: the format, its schema and its whitespace."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from model_runtime.text.grammar import ANY_OBJECT
from model_runtime.text.whitespace import ANY, NONE, checked_whitespace
from server.api.strict_body import Body


class JsonSchemaField(Body):
    """OpenAI's `json_schema`. Name and description change nothing; every schema is strict here."""

    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = Field(None, max_length=4096)


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaField | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the schema's problem if it is there without its type, or the other way round."""
        if self.json_schema is None and self.type == "json_schema":
            yield "json_schema", "is missing: `type` is json_schema"
        if self.json_schema is not None and self.type != "json_schema":
            yield "json_schema", f"needs `type` json_schema. Given: {self.type}"

    @property
    def schema_asked(self) -> Mapping[str, Any] | None:
        """Return the schema that the answer has to satisfy, or None."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`, of which the whitespace is served."""

    whitespace_pattern: Annotated[str, AfterValidator(checked_whitespace)] | None = None
    disable_any_whitespace: bool | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the conflict of both fields."""
        if self.whitespace_pattern is not None and self.disable_any_whitespace is not None:
            yield "disable_any_whitespace", "and `whitespace_pattern` exclude each other"

    @property
    def whitespace_asked(self) -> str | None:
        """Return the pattern of the whitespace in one place; None: the server's own."""
        if self.disable_any_whitespace is None:
            return self.whitespace_pattern
        return NONE if self.disable_any_whitespace else ANY
