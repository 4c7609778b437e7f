"""JSON schemas of the OpenAPI document, described in words and as examples."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
# Fields that a schema does not require, because another one may stand instead.
_TEXTS = ("prompt", "content")
PREFIX = "#/components/schemas/"
# keywords of a least and a largest value, and their unit
_RANGES = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " entries"),
)
_INT64 = 2**63 - 1  # and beyond: a bound of the type, and none that a reader meets


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of an object."""

    name: str
    kind: str  # its type in words; names of schemas stand in {braces}
    limits: str
    is_required: bool
    default: str  # as JSON; empty if there is none to tell
    text: str


def referred_name(schema: Schema) -> str | None:
    return str(schema["$ref"]).removeprefix(PREFIX) if "$ref" in schema else None


def field_rows(schema: Schema) -> Iterator[FieldRow]:
    """Yield a row for each field of an object's schema."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = field.get("default")
        yield FieldRow(
            name,
            kind(field),
            ", ".join(dict.fromkeys(_limits(field))),
            name in required,
            "" if default is None else json.dumps(default),
            field.get("description", ""),
        )


def kind(schema: Schema) -> str:
    """Return the type of a schema in words; names of components stand in {braces}."""
    name = referred_name(schema)
    if name is not None:
        return f"{{{name}}}"
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema["enum"])
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if parts:
        return " or ".join(dict.fromkeys(kind(part) for part in parts))
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return str(schema.get("type", "any value"))


def _limits(schema: Schema) -> Iterator[str]:
    """Yield the limits of a schema, of its parts and of a list's items."""
    yield from _own_limits(schema)
    for part in schema.get("anyOf", ()):
        yield from _limits(part)
    yield from (f"each {limit}" for limit in _own_limits(schema.get("items", {})))


def _own_limits(schema: Schema) -> Iterator[str]:
    for keyword, sign in (("exclusiveMinimum", ">"), ("exclusiveMaximum", "<")):
        if bound := _number(schema.get(keyword)):
            yield f"{sign} {bound}"
    for least, most, unit in _RANGES:
        low, high = (_number(schema.get(keyword)) for keyword in (least, most))
        if low and high:
            yield f"{low} to {high}{unit}"
        elif low or high:
            yield f">= {low}{unit}" if low else f"<= {high}{unit}"


def _number(bound: float | None) -> str:
    """Return a bound in digits; empty if there is none."""
    if bound is None or abs(bound) >= _INT64:
        return ""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def add_examples(components: Mapping[str, dict[str, Any]]) -> None:
    """Give each field without an example that of its type, if its type has one."""
    for schema in components.values():
        for field in schema.get("properties", {}).values():
            if "examples" not in field and (found := example(field, components)) is not None:
                field["examples"] = [found]


def example(schema: Schema, components: Mapping[str, Schema]) -> Any:
    """Return a small value that a route accepts, or None: the required fields and the text."""
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if "examples" in schema:
        return schema["examples"][0]
    if "$ref" in schema:
        return example(components[str(referred_name(schema))], components)
    if parts:
        return example(parts[0], components)
    if "properties" in schema:
        fields = schema["properties"]
        names = [*schema.get("required", ())]
        names += [each for each in _TEXTS if each in fields]
        return {each: example(fields[each], components) for each in dict.fromkeys(names)}
    if schema.get("type") == "array":
        found = example(schema.get("items", {}), components)
        return None if found is None else [found]
    return _of_type(schema)


def _of_type(schema: Schema) -> Any:
    """Return the only or the first value of a schema; None if its type has no such value."""
    for keyword in ("const", "default"):
        if schema.get(keyword) is not None:
            return schema[keyword]
    choices = schema.get("enum", ())
    if choices:
        return "user" if "user" in choices else choices[0]  # of roles, the one that asks
    return True if schema.get("type") == "boolean" else None
