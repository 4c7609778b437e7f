"""The supported JSON Schema keywords. Every other keyword is rejected by name."""

from collections.abc import Iterator, Mapping
from typing import Any

from ropewalk.model_runtime.errors import RequestError

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties")
_VALUES = (
    *("type", "enum", "const", "$ref", "format", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("required", "minItems", "maxItems", "minProperties", "maxProperties"),
)
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly"),
        "discriminator",  # OpenAPI's hint beside a oneOf, as pydantic writes it
    )
)
SUPPORTED = frozenset((*SCHEMAS_BY_NAME, *LISTS_OF_SCHEMAS, *SCHEMAS, *_VALUES, *ANNOTATIONS))


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
        if not holds_least_properties(found):
            told = "must be at most 1, or what `required` names"
            raise _refused(field, "minProperties", path, told)
        waiting += _inner(path, found)


def holds_least_properties(found: Mapping[str, Any]) -> bool:
    """Return whether a schema's minProperties is enforced.

    It may not exceed `required`, because a grammar does not detect repeated names.
    """
    least, required = found.get("minProperties", 0), found.get("required", ())
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    return not isinstance(least, int | float) or least <= max(1, num_required)


def _inner(path: str, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema, each with its path."""
    for keyword in SCHEMAS:
        yield f"{path}.{keyword}", found.get(keyword)
    for keyword in LISTS_OF_SCHEMAS:
        listed = found.get(keyword)
        for index, each in enumerate(listed if isinstance(listed, list) else ()):
            yield f"{path}.{keyword}[{index}]", each
    for keyword in SCHEMAS_BY_NAME:
        named = found.get(keyword)
        for name, each in (named if isinstance(named, Mapping) else {}).items():
            yield f"{path}.{keyword}.{name}", each


def _refused(field: str, keyword: str, path: str, problem: str) -> RequestError:
    return RequestError(
        f"`{field}`: the keyword {keyword[:64]!a} {problem} (at {path[:200]!a})", param=field
    )
