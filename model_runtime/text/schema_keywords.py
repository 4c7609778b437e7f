"""The supported JSON Schema keywords. Every other keyword is rejected by name."""

from collections.abc import Iterator, Mapping
from typing import Any

from model_runtime.errors import RequestError

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_VALUES = (
    *("type", "enum", "const", "$ref", "format", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("required", "minItems", "maxItems", "minProperties", "maxProperties"),
)
_SAY_NOTHING = (
    *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly"),
    "discriminator",  # OpenAPI's hint beside a oneOf, as pydantic writes it
)
# Values of propertyNames that restrict nothing, because names are strings.
_EVERY_NAME: tuple[Any, ...] = ({"type": "string"}, {}, True)
SUPPORTED = frozenset((*_SCHEMAS_BY_NAME, *_LISTS_OF_SCHEMAS, *_SCHEMAS, *_VALUES, *_SAY_NOTHING))


def refuse_unsupported(schema: Mapping[str, Any], field: str = "response_format") -> None:
    """Raise RequestError for the first keyword that would not be enforced.

    The compiler also rejects many of them, but ignores unknown keywords. It is the compiler that
    rejects values of a wrong type. The error names the request's `field`.
    """
    waiting: list[tuple[str, Any]] = [("$", schema)]  # no recursion: schemas may be deep
    while waiting:
        path, found = waiting.pop()
        if not isinstance(found, Mapping):
            continue  # true and false are also schemas
        for keyword in found:
            if keyword not in SUPPORTED:
                raise _refused(field, keyword, path, "is not supported")
        if isinstance(found.get("items"), list):
            raise _refused(
                field, "items", path, "must be one schema; for a list there is prefixItems"
            )
        _check_least_properties(field, path, found)
        waiting += _inner(path, found)


def without_every_name(schema: Any) -> Any:
    """Return a schema without each `propertyNames` that restricts nothing.

    The compiler refuses the keyword whatever it says. Zod writes it for every record.
    """
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "propertyNames" and value in _EVERY_NAME:
            continue
        if keyword in _SCHEMAS:
            found[keyword] = without_every_name(value)
        elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            found[keyword] = [without_every_name(each) for each in value]
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[keyword] = {name: without_every_name(each) for name, each in value.items()}
        else:
            found[keyword] = value
    return found


def _check_least_properties(field: str, path: str, found: Mapping[str, Any]) -> None:
    """Raise if minProperties exceeds `required`; a grammar does not detect repeated names."""
    least, required = found.get("minProperties", 0), found.get("required", ())
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(1, num_required):
        raise _refused(field, "minProperties", path, "must be at most 1, or what `required` names")


def _inner(path: str, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema, each with its path."""
    for keyword in _SCHEMAS:
        yield f"{path}.{keyword}", found.get(keyword)
    for keyword in _LISTS_OF_SCHEMAS:
        listed = found.get(keyword)
        for index, each in enumerate(listed if isinstance(listed, list) else ()):
            yield f"{path}.{keyword}[{index}]", each
    for keyword in _SCHEMAS_BY_NAME:
        named = found.get(keyword)
        for name, each in (named if isinstance(named, Mapping) else {}).items():
            yield f"{path}.{keyword}.{name}", each


def _refused(field: str, keyword: str, path: str, problem: str) -> RequestError:
    return RequestError(
        f"`{field}`: the keyword {keyword[:64]!a} {problem} (at {path[:200]!a})", param=field
    )
