"""The schemas that arguments of calls are held to: a tool's own, closed, without annotations.

By JSON Schema, an object may have properties beside those it lists. A model uses that freedom to
write arguments that no function takes, and the grammar does not see that it repeats one of them.
Therefore an object that lists its properties has no others here, if that surely only narrows it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ropewalk.model_runtime.text.schema_keywords import (
    ANNOTATIONS,
    LISTS_OF_SCHEMAS,
    SCHEMAS,
    SCHEMAS_BY_NAME,
    SUPPORTED,
    holds_least_properties,
)
from ropewalk.model_runtime.text.tools.tool_format import Tool

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
# Keywords of JSON Schema, OpenAPI and pydantic that restrict nothing. `x-` begins others.
_SAY_NOTHING = {
    *("contentMediaType", "contentEncoding", "contentSchema", "nullable", "example"),
    *("externalDocs", "xml", "$anchor", "$vocabulary", "markdownDescription"),
}
# The formats of strings that llguidance enforces.
_FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
}
# Values of propertyNames that restrict nothing, because names are strings. Zod writes them.
_EVERY_NAME: tuple[Any, ...] = ({"type": "string"}, {}, True)
# Their schemas apply to the same value as the keywords beside them.
_IN_PLACE = ("anyOf", "oneOf", "allOf", "$ref")
_DEFINITIONS = ("$defs", "definitions")
# Each escape, so that the parts behind it are not read as another, and each look-around.
_ESCAPES_AND_LOOKS = re.compile(r"\\(.)|\(\?<?[=!]", re.DOTALL)


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema that the arguments of a call are held to.

    Annotations and unknown formats are left out of it. A keyword that no grammar can hold is left
    out too, except if the tool `is_exact`: then it stays, and the checks refuse it by name.
    """
    if not tool.is_strict:
        return _ANY_ARGUMENTS
    if not tool.parameters:
        return NO_ARGUMENTS
    root = _without_reference({"type": "object", **tool.parameters})
    kept = _kept_open(root)
    copy = dict(root)
    waiting: list[tuple[dict[str, Any], Mapping[str, Any]]] = [(copy, root)]
    while waiting:  # no recursion: schemas may be deep
        schema, original = waiting.pop()
        is_closed = id(original) not in kept and _can_close(schema, is_root=original is root)
        _leave_out(schema, is_exact=tool.is_exact)
        if is_closed:
            schema["additionalProperties"] = False
        waiting += _copy_inner(schema)
    return copy


def _leave_out(schema: dict[str, Any], *, is_exact: bool) -> None:
    """Remove what restricts nothing, and unless `is_exact` what the grammar cannot hold."""
    for keyword in list(schema):
        if keyword in _SAY_NOTHING or keyword.startswith("x-"):
            del schema[keyword]
    if schema.get("propertyNames", False) in _EVERY_NAME:
        del schema["propertyNames"]
    given = schema.get("format")
    if isinstance(given, str) and given not in _FORMATS:
        del schema["format"]
    if is_exact:
        return
    listed = schema.get("items")
    if isinstance(listed, list):  # the older name of prefixItems
        del schema["items"]
        schema.setdefault("prefixItems", listed)
    for keyword in schema.keys() - SUPPORTED:
        del schema[keyword]
    if not holds_least_properties(schema):
        del schema["minProperties"]
    if _looks_around(schema.get("pattern")):
        del schema["pattern"]


def _looks_around(pattern: Any) -> bool:
    """Return whether a pattern depends on other text: look-around, word ends, back-references."""
    if not isinstance(pattern, str):
        return False
    found = _ESCAPES_AND_LOOKS.finditer(pattern)
    return any(each[1] is None or each[1] in "bB123456789" for each in found)


def _can_close(schema: Mapping[str, Any], *, is_root: bool) -> bool:
    """Return whether an object without other properties is a narrower form of the schema."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    # An inner object that lists no properties at all is meant to be free.
    return (
        (is_root or bool(properties))
        and not schema.keys() & {*_IN_PLACE, "additionalProperties", "patternProperties"}
        and schema.get("unevaluatedProperties", False) is False
        and all(isinstance(name, str) and name in properties for name in required)
    )


def _kept_open(root: Mapping[str, Any]) -> set[int]:
    """Return the ids of the schemas that are not to be closed.

    These are schemas whose values another schema restricts too, as in `allOf`: closed, they would
    exclude the other's properties. In `oneOf`, a narrower schema may even make the whole wider.
    """
    kept: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        schema, is_kept = waiting.pop()
        if not isinstance(schema, Mapping) or (id(schema), is_kept) in seen:
            continue
        seen.add((id(schema), is_kept))
        if is_kept:
            kept.add(id(schema))
        alone = _alone(schema)
        for keyword, inner in _inner(schema):
            waiting.append((inner, is_kept or (keyword in _IN_PLACE and keyword != alone)))
        target = _target(root, schema.get("$ref"))
        waiting.append((target, is_kept or alone != "$ref"))
    return kept


def _alone(schema: Mapping[str, Any]) -> str | None:
    """Return the keyword that alone restricts a schema, if its own schemas may be narrowed."""
    says = (schema.keys() & SUPPORTED) - ANNOTATIONS - {"type", *_DEFINITIONS}
    if says == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
        return "allOf"
    return next((each for each in ("anyOf", "$ref") if says == {each}), None)


def _without_reference(root: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that a root refers to, with the root's definitions.

    Formats that name each argument read the properties of the root.
    """
    found, seen = root, set[str]()
    while _alone(found) == "$ref" and found["$ref"] not in seen:
        target = _target(root, found["$ref"])
        if not isinstance(target, Mapping):
            break
        seen.add(found["$ref"])
        definitions = {name: root[name] for name in _DEFINITIONS if name in root}
        found = {"type": "object", **target, **definitions}
    return found


def _target(root: Mapping[str, Any], reference: Any) -> Any:
    """Return the value that a reference within the schema points to; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping):
            found = found.get(name)
        else:
            return None
    return found


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas with the keywords that they belong to."""
    for keyword in SCHEMAS:
        yield keyword, schema.get(keyword)
    for keyword in LISTS_OF_SCHEMAS:
        held = schema.get(keyword)
        yield from ((keyword, each) for each in (held if isinstance(held, list) else ()))
    for keyword in SCHEMAS_BY_NAME:
        named = schema.get(keyword)
        listed = named.values() if isinstance(named, Mapping) else ()
        yield from ((keyword, each) for each in listed)


def _copy_inner(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Replace the direct subschemas by copies; yield each copy with its original."""
    for keyword in SCHEMAS:
        original = schema.get(keyword)
        if isinstance(original, Mapping):
            schema[keyword] = dict(original)
            yield schema[keyword], original
    for keyword in (*LISTS_OF_SCHEMAS, *SCHEMAS_BY_NAME):
        held: Any = schema.get(keyword)
        if not isinstance(held, list if keyword in LISTS_OF_SCHEMAS else Mapping):
            continue
        copies: Any = list(held) if isinstance(held, list) else dict(held)
        schema[keyword] = copies
        for place in range(len(held)) if isinstance(held, list) else held:
            if isinstance(held[place], Mapping):
                copies[place] = dict(held[place])
                yield copies[place], held[place]
