"""JSON schemas that answers are held to, and hostile ones."""

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    """A schema of an object with all of these fields required and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "required": _object(name={"type": "string", "maxLength": 12}, age={"type": "integer"}),
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": "x"}},
        "required": ["b"],
        "additionalProperties": {"type": "integer"},
    },
    "a map": {
        "type": "object",
        "additionalProperties": {"enum": [1, 2]},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "enums": _object(colour={"enum": ["red", "green", 3, None]}, unit={"const": {"si": [1, 2]}}),
    "nested arrays": _object(
        rows={
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "minItems": 2,
            "maxItems": 4,
        }
    ),
    "bounds": _object(
        share={"type": "number", "minimum": 0, "maximum": 1},
        year={"type": "integer", "exclusiveMinimum": 1900, "maximum": 2100},
        dozen={"type": "integer", "multipleOf": 12, "minimum": 0},
    ),
    "patterns": _object(
        zip={"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"},
        word={"type": "string", "pattern": "^\\w+\\s\\d$", "maxLength": 20},
    ),
    "formats": _object(day={"type": "string", "format": "date"}, id={"format": "uuid"}),
    "anyOf": {"anyOf": [{"type": "integer"}, _object(a={"type": "boolean"}), {"type": "null"}]},
    "refs": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(
                value={"type": "integer"},
                next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            )
        },
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 4,
    },
    "patterned names": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}, "^b_": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "unicode": _object(
        **{"naïve \U0001f600": {"enum": ["größe", "日本", "\u2028\x7f"]}},
        two={"type": "string", "minLength": 2, "maxLength": 4},
    ),
    "top-level string": {"type": "string", "maxLength": 10},
}


def _nested(depth: int, keyword: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: [schema] if keyword.endswith("Of") else schema}
    return schema


def _product(num_factors: int) -> dict[str, Any]:
    """An intersection of alternatives: 2 to the `num_factors`, written out."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"p{at}_{side}": {"const": side}}} for side in range(2)]}
            for at in range(num_factors)
        ]
    }


def _doubling(num_levels: int) -> dict[str, Any]:
    """Each definition holds the next twice."""
    two = {
        f"d{level}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/d{level + 1}"} for side in "ab"},
            "required": ["a", "b"],
        }
        for level in range(num_levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**two, f"d{num_levels}": {"type": "null"}}}


HOSTILE: dict[str, Any] = {
    "a million alternatives": {"enum": list(range(10**6))},
    "ten thousand alternatives": {"enum": [f"{each:x}" for each in range(8000)]},
    "depth 60": _nested(60, "items"),
    "depth 500": _nested(500, "items"),
    "depth of alternatives": _nested(100, "anyOf"),
    "a large remainder": {"type": "integer", "multipleOf": 999_983},
    "a least common multiple": {
        "type": "integer",
        "allOf": [{"multipleOf": each} for each in (9973, 9967, 9949)],
    },
    "an exponential automaton": {"type": "string", "pattern": "^(a|b)*a(a|b){40}$"},
    "repeats of repeats": {"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99})b$"},
    "many automata": {
        "anyOf": [
            {"type": "string", "pattern": f".*{each}.{{200}}z"} for each in "abcdefghijklmnop"
        ]
    },
    "a long string": {"type": "string", "minLength": 10**9},
    "a long array": {"type": "array", "items": {"type": "object"}, "minItems": 10**9},
    "itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "itself and itself": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
    },
    "no end": {
        "$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "minItems": 1, "type": "array"}},
        "$ref": "#/$defs/a",
    },
    "a product": _product(30),
    "a doubling": _doubling(40),
    "optional properties": {"properties": {f"p{each}": True for each in range(3000)}},
}
