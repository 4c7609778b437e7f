r"""Keywords of JSON Schema, one by one: a grammar keeps them, or they are refused by name.

jsonschema-rs judges the examples, too, so that none of them is our own opinion.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import pydantic
import pytest
from llguidance import LLMatcher

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.text.grammar_trial import grammar_of, matcher_of, problem_of
from ropewalk.model_runtime.text.schema_keywords import (
    ANNOTATIONS,
    FORMATS,
    KEPT,
    REFUSED,
    REFUSED_FORMATS,
    kept_schema,
)
from ropewalk.model_runtime.text.whitespace import NONE
from tests.model_runtime.text.tools.test_call_grammar import tokenizer, vocabulary

API_PAGE = Path(__file__).parents[3] / "docs/reference/api.md"
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}
# keyword -> (schema, valid values, invalid values)
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": ["integer", "null"]}, [1, None], ["a", 1.5, True, [], {}]),
    "enum": ({"enum": ["a", 2, [1], {"b": None}]}, ["a", 2, [1], {"b": None}], ["b", 3, [], {}]),
    "const": ({"const": {"a": [1, "\n"]}}, [{"a": [1, "\n"]}], [{"a": [1]}, {}, "a"]),
    "anyOf": ({"anyOf": [{"type": "null"}, {"minimum": 3}], "type": ["null", "integer"]},
              [None, 3], [2, "a"]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, 1.5]),
    "allOf": ({"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 4}]}, [3, 4], [2, 5]),
    "$ref": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, [1], [2]),
    "$defs": ({"items": {"$ref": "#/$defs/a"}, "type": "array", "$defs": {"a": {"const": 1}}},
              [[], [1]], [[2]]),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"const": 1}}}, [1], [2]),
    "$id": ({"$id": "http://a.b/c", "$ref": "http://a.b/c#/$defs/a", "$defs": {"a": {"const": 1}}},
            [1], [2]),
    "$anchor": ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, [1], [2]),
    "properties": ({**OBJECT, "properties": {"a": {"const": 1}}}, [{"a": 1}, {}], [{"a": 2}]),
    "patternProperties": ({**OBJECT, "patternProperties": {"^a": {"const": 1}}},
                          [{"ab": 1}, {"b": 2}], [{"ab": 2}]),
    "additionalProperties": ({**OBJECT, "additionalProperties": {"const": 1}},
                             [{}, {"a": 1}], [{"a": 2}]),
    "required": ({**OBJECT, "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    "minProperties": ({**OBJECT, "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({**OBJECT, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 1}]),
    "items": ({**ARRAY, "items": {"const": 1}}, [[], [1, 1]], [[2], [1, 2]]),
    "prefixItems": ({**ARRAY, "prefixItems": [{"const": 1}], "items": False}, [[], [1]],
                    [[2], [1, 1]]),
    "additionalItems": ({"$schema": "http://json-schema.org/draft-07/schema#", **ARRAY,
                         "items": [{"const": 1}], "additionalItems": {"const": 2}},
                        [[], [1], [1, 2, 2]], [[2], [1, 1]]),
    "minItems": ({**ARRAY, "minItems": 2}, [[1, 1]], [[], [1]]),
    "maxItems": ({**ARRAY, "maxItems": 1}, [[], [1]], [[1, 1]]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "\u00e9\u00e9"], ["", "\u00e9"]),
    "maxLength": ({"type": "string", "maxLength": 1}, ["", "\U0001f600"], ["ab"]),
    "pattern": ({"type": "string", "pattern": 'a[^"\\\\]'}, ["xab", "a\nb"], ['a"', "a\\", "a"]),
    "format": ({"format": "date"}, ["2024-02-29", "2000-02-29"], ["1900-02-29", "2024-13-01", "a"]),
    "minimum": ({"type": "number", "minimum": 1.5}, [1.5, 2], [1, -2]),
    "maximum": ({"type": "number", "maximum": 1.5}, [1.5, -2], [1.6, 2]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
                         [0.001, 0.5], [0, 0.6]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5},
                         [-0.001, -0.5], [0, -0.6]),
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, [0, 1.5, 2], [0.25, 1.7]),
}  # fmt: skip
# keyword -> a schema that it restricts, the keyword first
REFUSALS: dict[str, dict[str, Any]] = {
    "not": {"not": {"const": 1}},
    "if": {"if": {"const": 1}, "then": False},
    "then": {"then": False, "if": {"const": 1}},
    "else": {"else": False, "if": {"const": 1}},
    "$dynamicRef": {"$dynamicRef": "#"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "uniqueItems": {"uniqueItems": True},
    "unevaluatedItems": {"unevaluatedItems": False},
    "contains": {"contains": {"const": 1}},
    "minContains": {"minContains": 2, "contains": {"const": 1}},
    "maxContains": {"maxContains": 2, "contains": {"const": 1}},
    "x-guidance": {"x-guidance": {"lenient": True}},
}
FORMAT_CASES: dict[str, tuple[list[str], list[str]]] = {
    "date-time": (["2024-02-29T12:00:00.5+01:00"],
                  ["2023-02-29T12:00:00Z", "2024-02-29T12:00:60Z"]),
    "time": (["23:59:59Z"], ["24:00:00Z", "12:00:60Z", "12:00"]),
    "date": (["2024-12-31"], ["2024-11-31", "24-1-1"]),
    "duration": (["P1DT2H"], ["P", "1D"]),
    "email": (["a@b.c"], ["a", f"{'a' * 65}@b.c"]),
    "hostname": (["a.b-c"], ["-a", "a..b", ".".join(["a" * 60] * 5)]),
    "ipv4": (["1.2.3.4"], ["1.2.3.256", "1.2.3"]),
    "ipv6": (["::1"], [":", "1::2::3"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "uri": (["http://a/b?c"], ["a", "http://a b"]),
}  # fmt: skip


def grammar(schema: Any, **options: Any) -> LLMatcher:
    """The grammar of a client's schema."""
    found = matcher_of(grammar_of(json.dumps(kept_schema(schema, **options)), NONE), vocabulary())
    if problem := problem_of(found):
        raise RequestError(problem)
    return found


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a grammar allows a whole text."""
    fresh, ids = matcher.deep_copy(), tokenizer().encode(text)
    return fresh.try_consume_tokens(ids) == len(ids) and bool(fresh.is_accepting())


def check(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """Compare a schema's verdicts with those of an independent validator, and with ours."""
    matcher, oracle = grammar(schema), jsonschema_rs.validator_for(schema, validate_formats=True)
    for value, is_valid in (
        *((each, True) for each in valid),
        *((each, False) for each in invalid),
    ):
        assert oracle.is_valid(value) is is_valid, value
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert accepts(matcher, text) is is_valid, text


@pytest.mark.parametrize("keyword", KEPT)
def test_a_kept_keyword_is_kept(keyword: str) -> None:
    """Alone, and in a schema within another."""
    schema, valid, invalid = CASES[keyword]
    assert keyword in json.dumps(schema)
    check(schema, valid, invalid)
    if not {"$defs", "$ref", "$schema"} & schema.keys():
        inner = {**ARRAY, "items": {"anyOf": [schema]}, "minItems": 1}
        check(inner, [[each] for each in valid], [[each] for each in invalid])


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize(
    ("place", "wrap"),
    [
        ("$", lambda schema: schema),
        ("$.properties.a", lambda schema: {"properties": {"a": schema}}),
        ("$.items.anyOf.1", lambda schema: {"items": {"anyOf": [True, schema]}}),
        ("$.$defs.a.patternProperties.^b", lambda schema: {
            "$defs": {"a": {"patternProperties": {"^b": schema}}}}),
        ("$.prefixItems.0.additionalProperties", lambda schema: {
            "prefixItems": [{"additionalProperties": schema}]}),
    ],
)  # fmt: skip
def test_a_refused_keyword_is_refused_by_name(
    keyword: str, place: str, wrap: Callable[[Any], Any]
) -> None:
    """With its place; a tool that is not strict is served without it."""
    schema = wrap(REFUSALS[keyword])
    with pytest.raises(RequestError) as refused:
        kept_schema(schema, "text.format")
    assert str(refused.value) == (
        f"`text.format`: the keyword {keyword!r} is not supported (at {place!r})"
    )
    assert refused.value.param == "text.format"
    assert keyword not in json.dumps(kept_schema(schema, is_lenient=True))


def test_a_keyword_of_another_type_changes_nothing() -> None:
    """Nor do values that allow everything, and keywords whose other half is missing."""
    for keyword, of_type in (*KEPT.items(), *REFUSED.items()):
        if of_type and keyword != "additionalItems":
            fragment = REFUSALS.get(keyword) or {keyword: CASES[keyword][0][keyword]}
            assert kept_schema({**fragment, "type": ["null", "boolean"]}) == {
                "type": ["null", "boolean"]
            }
    check({"type": "string", "uniqueItems": True, "maxLength": 1}, ["a"], ["ab", []])
    harmless: list[dict[str, Any]] = [
        *({"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"not": False}),
        *({"unevaluatedProperties": True}, {"unevaluatedItems": {}}, {"dependentRequired": {}}),
        *({"then": {"const": 1}}, {"minContains": 2}, {"additionalItems": False}),
        *({"dependentSchemas": {}}, {"dependencies": {}}, {"format": "path"}, {"x-order": 1}),
    ]
    for schema in harmless:
        assert kept_schema(schema) == {}, schema
        assert jsonschema_rs.is_valid(schema, {"a": [1, 1]})


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS))
def test_an_annotation_restricts_nothing(keyword: str) -> None:
    """Neither at the root nor within, and references do not lead into it."""
    schema = {"type": "array", "items": {"const": 1, keyword: {"uniqueItems": True}}, keyword: "a"}
    assert kept_schema(schema) == {"type": "array", "items": {"const": 1}}
    assert accepts(grammar(schema), "[1,1]")
    hidden = {"$ref": f"#/{keyword}", keyword: {"uniqueItems": True}}
    with pytest.raises(RequestError, match=r"'\$ref' must be a reference to a schema"):
        kept_schema(hidden)


def test_the_page_says_what_the_code_does() -> None:
    """Keyword by keyword, and the formats."""
    told: dict[str, str] = {}
    rows = re.findall(
        r"^\| (`.*`) \| (kept|refused|annotation) \| ?(.*) ?\|$", API_PAGE.read_text(), re.MULTILINE
    )
    for names, verdict, remarks in rows:
        told |= dict.fromkeys(re.findall(r"`([^`]+)`", names), verdict)
        if names == "`format`":
            assert set(re.findall(r"`([^`]+)`", remarks.partition(".")[0])) == FORMATS
    assert told == {
        **dict.fromkeys(KEPT, "kept"),
        **dict.fromkeys(REFUSED, "refused"),
        **dict.fromkeys(ANNOTATIONS, "annotation"),
    }


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_is_kept(name: str) -> None:
    """Also what the library does not keep by itself: leap years, seconds and lengths."""
    check({"type": "string", "format": name}, *FORMAT_CASES[name])


def test_other_formats_of_the_specification_are_refused() -> None:
    """The error lists those that are kept."""
    for name in REFUSED_FORMATS:
        with pytest.raises(RequestError, match=f"'format' must be one of date, .*Given: {name}"):
            kept_schema({"format": name})


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "strin"}, "'type' must be one of object, "),
        ({"enum": []}, "'enum' must be a list of values"),
        ({"required": True, "minProperties": 2}, "'required' must be a list of names"),
        ({"properties": {"a": 5}}, "'properties' must be an object of schemas"),
        ({"anyOf": []}, "'anyOf' must be a list of schemas"),
        ({"items": "a"}, "'items' must be a schema, or a list of them"),
        ({"additionalProperties": None}, "'additionalProperties' must be a schema"),
        ({"minLength": "2"}, "'minLength' must be an integer >= 0"),
        ({"maximum": True}, "'maximum' must be a number"),
        ({"multipleOf": 0}, "'multipleOf' must be a number > 0"),
        ({"pattern": 5}, "'pattern' must be a string"),
        ({"pattern": "(?=a)"}, "'pattern' must have no look-around"),
        ({"pattern": "[[:^punct:]]"}, "'pattern' must have no look-around"),
        ({"patternProperties": {"(?!a)": True}}, "'patternProperties' must have no look-around"),
        ({"minimum": 1e20}, "'minimum' must be less than 2^63 from 0"),
        ({"const": 2**53 + 1}, "'const' must have no integers beyond 2^53"),
        ({"enum": [{"a": ["\0"]}]}, "'enum' must have no control characters but"),
        ({"$ref": "#/properties/a/const"}, "'$ref' must be a reference to a schema"),
        ({"minProperties": 2}, "'minProperties' must be at most 1, or what"),
        ({"maxlength": 2}, "'maxlength' is not supported"),
    ],
)
def test_a_wrong_value_is_refused_with_keyword_and_place(schema: Any, told: str) -> None:
    """Before the library sees it, whose words have no place."""
    with pytest.raises(RequestError) as refused:
        kept_schema({"$defs": {"x": schema}})
    assert f"the keyword {told}" in str(refused.value)
    assert str(refused.value).endswith("(at '$.$defs.x')")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, [1.001, 1.5], [1, 1.6]),
        ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, [-1.001], [-1, -1.6]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.001, 0.99], [0, 1]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, [1], [0, 2]),
        ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}], "type": "number"}, [2.1], [2]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 6}, [2**53 + 2, 2**53 + 6],
         [2**53, 2**53 + 8]),
        ({"enum": [2**53, -(2**53)]}, [2**53, -(2**53)], [2**53 - 1]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [2**62], [2**63]),
        ({"type": "integer", "exclusiveMaximum": 2**60, "minimum": 2**60 - 600}, [2**60 - 256],
         [2**60, 2**60 + 1]),
        ({"type": "integer", "exclusiveMinimum": -(2**60), "maximum": 0}, [-(2**60) + 256],
         [-(2**60)]),
        ({"type": "number", "exclusiveMinimum": 1e17}, [10**17 + 32], [10**17]),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, [0, -1.5, 1e15], []),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
            "a": {**OBJECT, "properties": {"k": {"const": "a"}}, "required": ["k"]},
            "b": {**OBJECT, "properties": {"k": {"const": "b"}}, "required": ["k"]}}},
         [{"k": "a"}, {"k": "b"}], [{"k": "c"}, {}]),
        ({"type": "string", "pattern": '^[^"]*$'}, ["a\n\\", ""], ['a"']),
        ({"type": "string", "pattern": r"^[^-\\]$"}, ["a", "]", '"'], ["-", "\\"]),
        ({"type": "string", "pattern": r"^[^]\[]$"}, ["a", "-"], ["]", "["]),
        ({"type": "string", "pattern": r"^[\x00-\x1f]$"}, ["\n"], ['"', "\\", "a"]),
        ({"type": "string", "pattern": r"^\P{P}$"}, ["a", "\n", "\u00e9"], ['"', "\\", "."]),
        ({"type": "string", "pattern": r"^[\p{Cc}a-]$"}, ["a", "-", "\n"], ['"', "\\", "b"]),
        ({"type": "string", "pattern": r"^[^\P{P}.]$"}, ['"', "\\"], ["a", ".", "\n"]),
        ({"type": "string", "pattern": r"^\\x00$"}, [r"\x00"], [r"\x01", "a"]),
        ({"type": "object", "patternProperties": {'^[^"]$': {"const": 1}},
          "additionalProperties": False}, [{"a": 1}], [{'"': 1}]),
    ],
)  # fmt: skip
def test_what_the_library_does_not_keep_is_kept(
    schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    """Llguidance 1.9 allows the excluded bounds, and a quote in a class that excludes it."""
    check(schema, valid, invalid)


class Part(pydantic.BaseModel):
    """A part of the model below."""

    kind: Literal["a", "b"]
    share: float = pydantic.Field(gt=0, lt=1)


class Whole(pydantic.BaseModel):
    """What pydantic writes for common types."""

    part: Part
    parts: list[Part] = pydantic.Field(max_length=1)
    maybe: int | None = pydantic.Field(None, ge=0, title="Maybe", examples=[3])
    pair: tuple[Literal[1], Literal["x"]]
    path: Path
    one: Literal["only"] = "only"


class WithSet(Whole):
    """A set is a list of different items."""

    names: set[str]


def test_schemas_of_pydantic() -> None:
    """They work, or the keyword is refused by name."""
    schema = Whole.model_json_schema()
    part = {"kind": "a", "share": 0.5}
    whole = {"part": part, "parts": [part], "maybe": None, "pair": [1, "x"], "path": "/a"}
    wrong = [
        {**whole, "part": {**part, "share": 1}},
        {**whole, "pair": [1]},
        {**whole, "maybe": -1},
    ]
    check(schema, [whole, {**whole, "maybe": 3, "one": "only"}], wrong)
    with pytest.raises(RequestError, match=r"'uniqueItems' is not supported .*properties\.names'"):
        kept_schema(WithSet.model_json_schema())


def _schemas(rng: random.Random, depth: int) -> Any:
    """A random schema of the kept keywords, with small numbers and few letters."""
    numbers = {key: rng.choice([-1, 0, 1, 2, 0.5, -0.5, 1.25]) for key in KEPT if "imum" in key}
    strings = {"minLength": rng.randint(0, 2), "maxLength": rng.randint(1, 3),
               "pattern": rng.choice(["^a", "b$", "[^a]", '^[^"]*$', "^(a|b)*$"])}  # fmt: skip
    some = [each for each in (*numbers.items(), *strings.items()) if rng.random() < 0.3]
    flat = {**dict(some), "type": rng.sample(["number", "integer", "string", "null"], 2)}
    if depth == 0 or rng.random() < 0.3:
        return flat
    inner = [_schemas(rng, depth - 1) for _ in range(3)]
    return rng.choice([
        {**ARRAY, "items": inner[0], "prefixItems": inner[1:2], "maxItems": rng.randint(1, 3)},
        {**OBJECT, "properties": {"a": inner[0], "b": inner[1]}, "required": ["b"],
         "additionalProperties": rng.choice([False, inner[2]])},
        {**OBJECT, "patternProperties": {"^a": inner[0]}, "properties": {"ab": inner[1]}},
        {"anyOf": inner}, {"allOf": inner[:2]}, {"oneOf": inner[:2]}, {**flat, "anyOf": inner},
    ])  # fmt: skip


VALUES: list[Any] = [
    *(None, 0, 1, 2, -1, 0.5, -0.5, 1.25, 0.001, 3, "", "a", "b", "ab", 'a"', "aab", "\\", [], [1]),
    *(["a"], [0.5, "a"], [None, 1, "b"], {}, {"a": 1}, {"b": "b"}, {"a": None, "b": 0}, {"ab": 1}),
    *({"b": 1, "c": "a"}, {"a": [1]}, [[]], [{"b": 1}]),
]


def _verdicts(seed: int) -> Iterator[tuple[Any, Any, bool, bool]]:
    """Schema, value, and both verdicts, for schemas that are not refused."""
    rng = random.Random(seed)
    for _ in range(120):
        schema = _schemas(rng, 2)
        try:
            matcher = grammar(schema)
        except RequestError:
            continue
        oracle = jsonschema_rs.validator_for(schema)
        for value in VALUES:
            text = json.dumps(value, separators=(",", ":"))
            yield schema, value, accepts(matcher, text), oracle.is_valid(value)


@pytest.mark.parametrize("seed", range(3))
def test_a_grammar_accepts_nothing_that_is_invalid(seed: int) -> None:
    """Combinations of keywords, too. It may accept less: properties in another order."""
    num_valid = 0
    for schema, value, is_accepted, is_valid in _verdicts(seed):
        assert is_valid or not is_accepted, (schema, value)
        num_valid += is_accepted
    assert num_valid > 100
