"""The schemas that arguments are held to: closed, without annotations, never wider."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.text.grammar_trial import grammar_of, matcher_of, problem_of
from ropewalk.model_runtime.text.tools.argument_schema import arguments_schema
from ropewalk.model_runtime.text.tools.tool_format import Tool
from ropewalk.model_runtime.text.whitespace import ONE_SPACE
from tests.model_runtime.text.tools.test_call_grammar import tokenizer, vocabulary

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Place(BaseModel):
    """A nested model."""

    city: str
    near: "Place | None" = None


class Cat(BaseModel):
    """One kind."""

    kind: Literal["cat"]


class Dog(BaseModel):
    """Another kind."""

    kind: Literal["dog"]


class Trip(BaseModel):
    """Arguments as pydantic writes them."""

    start: Place = Field(description="where it begins")
    stops: list[Place] = []
    guests: dict[str, Place] = {}
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None


def enforced(parameters: Any, **changes: Any) -> Any:
    """The schema of a tool's arguments."""
    return arguments_schema(Tool("f", None, parameters, **changes))


def accepts(schema: Any, value: str) -> bool:
    """Whether the grammar of a schema allows a whole text."""
    matcher = matcher_of(grammar_of(json.dumps(schema), ONE_SPACE), vocabulary())
    assert not problem_of(matcher), problem_of(matcher)
    ids = tokenizer().encode(value)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ('{"start":{"city":"a"}}', True),
        ('{"start":{"city":"a","near":{"city":"b"}},"stops":[{"city":"c"}]}', True),
        ('{"start":{"city":"a"},"guests":{"x":{"city":"b"}}}', True),
        ('{"start":{"city":"a"},"pet":{"kind":"dog"}}', True),
        ('{"start":{"city":"a","x":1}}', False),
        ('{"start":{"city":"a","city":"b"}}', False),
        ('{"start":{"city":"a","near":{"city":"b","x":1}}}', False),
        ('{"start":{"city":"a"},"stops":[{"city":"c","x":1}]}', False),
        ('{"start":{"city":"a"},"guests":{"x":{"city":"b","x":1}}}', False),
        ('{"start":{"city":"a"},"x":1}', False),
    ],
)
def test_nested_models_are_closed(value: str, *, is_valid: bool) -> None:
    """By references, in lists, as values of a mapping, and in themselves."""
    assert accepts(enforced(Trip.model_json_schema()), value) is is_valid


def test_a_root_that_is_a_reference_is_closed() -> None:
    """Its properties stand at the root, as formats of named arguments need them."""
    schema = enforced({"$ref": "#/$defs/A", "$defs": {"A": OPEN}})
    assert schema["properties"] == OPEN["properties"]
    assert accepts(schema, '{"a":1}')
    assert not accepts(schema, '{"a":1,"b":1}')
    endless = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert enforced(endless)["$defs"] == endless["$defs"]


@pytest.mark.parametrize(
    "wide",
    [
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "integer"}},
        {**OPEN, "patternProperties": {"^b": {}}},
        {**OPEN, "unevaluatedProperties": True},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]},
        {**OPEN, "anyOf": [{"properties": {"b": {}}}]},
        {"$ref": "#/$defs/A", "properties": {"b": {}}},
        {"properties": {"a": {}, "b": {}}, "required": ["b", "c"]},
    ],
)
def test_an_object_that_asks_for_more_stays_open(wide: Any) -> None:
    """Closed, it would exclude what its own schema or the one beside it asks for."""
    schema = enforced({"properties": {"v": wide}, "$defs": {"A": OPEN}})
    assert '"additionalProperties": false' not in json.dumps(schema["properties"])
    assert (schema["$defs"]["A"] == OPEN) is ("$ref" in json.dumps(wide))
    assert schema["additionalProperties"] is False


def test_a_schema_of_one_of_stays_open() -> None:
    """A narrower part could make a value valid that the original excludes."""
    defs = {"A": OPEN, "B": {"type": "object", "properties": {"b": {"type": "integer"}}}}
    one = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    schema = enforced({"properties": {"v": one}, "$defs": defs})
    assert schema["$defs"] == defs
    assert schema["additionalProperties"] is False
    assert not jsonschema_rs.is_valid({"properties": {"v": one}, "$defs": defs}, {"v": {"a": 1}})


class Ordinary(BaseModel):
    """Types of Python whose schemas no grammar holds in full."""

    names: set[str]
    path: Path
    raw: bytes
    price: Decimal


def test_ordinary_types_are_served() -> None:
    """Sets, paths, bytes and look-around lose a keyword, and the tool is not changed."""
    parameters = Ordinary.model_json_schema()
    parameters["x-order"] = 1
    parameters["properties"]["path"] |= {"nullable": True, "contentMediaType": "text/plain"}
    before = json.dumps(parameters)
    schema = enforced(parameters)
    assert accepts(schema, '{"names":["a"],"path":"b","raw":"c","price":"1"}')
    assert not accepts(schema, '{"names":[1],"path":"b","raw":"c","price":"1"}')
    assert json.dumps(parameters) == before
    del parameters["properties"]["names"], parameters["properties"]["price"]
    parameters["required"] = []
    assert accepts(enforced(parameters, is_exact=True), '{"path":"b"}')


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"uniqueItems": True, "type": "array"}, "uniqueItems"),
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"format": "iri"}, "format"),
    ],
)
def test_strict_tools_are_refused_with_what_no_grammar_keeps(value: Any, keyword: str) -> None:
    """By name; other tools are served without it."""
    parameters = {"properties": {"v": value}}
    with pytest.raises(RequestError, match=f"`tools`: the keyword '{keyword}'"):
        enforced(parameters, is_exact=True)
    assert keyword not in enforced(parameters)["properties"]["v"]


@pytest.mark.parametrize(
    ("pattern", "is_kept"),
    [
        (r"^a(?!b)", False),
        (r"(?<=a)b", False),
        (r"\bword\b", False),
        (r"(a)\1", False),
        (r"^\\b$", True),
        (r"^(?<year>\d{4})$", True),
        (r"^\(\?$", True),
    ],
)
def test_only_patterns_that_look_around_are_left_out(pattern: str, *, is_kept: bool) -> None:
    """The others are enforced; a kept pattern compiles."""
    schema = enforced({"properties": {"v": {"type": "string", "pattern": pattern}}})
    assert ("pattern" in schema["properties"]["v"]) is is_kept
    assert accepts(schema, "{}")
