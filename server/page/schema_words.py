"""JSON schemas of the OpenAPI document, described in words and as examples."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
# Fields that a schema does not require, because another one may stand instead.
_TEXTS = ("prompt", "content")
_PREFIX = "#/components/schemas/"
# keyword -> words before its value
_LIMITS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minLength": "characters >=",
    "maxLength": "characters <=",
    "minItems": "items >=",
    "maxItems": "items <=",
}


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
    return str(schema["$ref"]).removeprefix(_PREFIX) if "$ref" in schema else None


def field_rows(schema: Schema) -> Iterator[FieldRow]:
    """Yield a row for each field of an object's schema."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = field.get("default")
        yield FieldRow(
            name,
            kind(field),
            ", ".join(_limits(field)),
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
    """Yield the limits of a schema, or of its only part that has some."""
    for keyword, words in _LIMITS.items():
        if keyword in schema:
            yield f"{words} {schema[keyword]:g}"
    for part in schema.get("anyOf", ()):
        yield from _limits(part)


def example(schema: Schema, components: Mapping[str, Schema]) -> Any:
    """Return a small value that a route accepts: the required fields and the text."""
    referred = referred_name(schema)
    if referred is not None:
        return example(components[referred], components)
    if "examples" in schema:
        return schema["examples"][0]
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if parts:
        return example(parts[0], components)
    if schema.get("type") == "object":
        fields = schema.get("properties", {})
        names = [*schema.get("required", ())]
        names += [each for each in _TEXTS if each in fields]
        return {each: example(fields[each], components) for each in dict.fromkeys(names)}
    if schema.get("type") == "array":
        return [example(schema.get("items", {}), components)]
    return _scalar(schema)


def _scalar(schema: Schema) -> Any:
    for keyword in ("const", "default"):
        if schema.get(keyword) is not None:
            return schema[keyword]
    choices = schema.get("enum", ())
    if choices:
        return "user" if "user" in choices else choices[0]  # of roles, the one that asks
    if schema.get("type") in ("integer", "number"):
        return int(schema.get("minimum", 1))
    return True if schema.get("type") == "boolean" else "Once upon a time"
