"""The schemas that arguments of calls are held to: a tool's own, closed, without annotations.

By JSON Schema, an object may have properties beside those it lists. A model uses that freedom to
write arguments that no function takes, and the grammar does not see that it repeats one of them.
Therefore an object that lists its properties has no others here, if that surely only narrows it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ropewalk.model_runtime.text.schema_keywords import (
    KEPT,
    LISTS_OF_SCHEMAS,
    SCHEMAS,
    SCHEMAS_BY_NAME,
    copy_parts,
    kept_schema,
    pointer_parts,
)
from ropewalk.model_runtime.text.tools.tool_format import Tool

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
# Their schemas apply to the same value as the keywords beside them.
_IN_PLACE = ("anyOf", "oneOf", "allOf", "$ref")
_DEFINITIONS = ("$defs", "definitions")
_NAMES = ("$id", "$anchor")


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema that the arguments of a call are held to.

    A keyword that no grammar keeps is left out of it. If the tool `is_exact`, the keyword raises
    RequestError. So does a wrong value of another keyword.
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
        if id(original) not in kept and _can_close(schema, is_root=original is root):
            schema["additionalProperties"] = False
            schema.pop("unevaluatedProperties", None)
        parts = copy_parts(schema)
        waiting += [(part, of) for _, part, of in parts if isinstance(of, Mapping)]
    return kept_schema(copy, "tools", is_lenient=not tool.is_exact)


def is_text(schema: Any) -> bool:
    """Return whether a property is a string and nothing else, written without quotes."""
    if not isinstance(schema, Mapping):
        return False
    if "enum" in schema and all(isinstance(each, str) for each in schema["enum"]):
        return True
    return schema.get("type") == "string" or isinstance(schema.get("const"), str)


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
    says = (schema.keys() & KEPT.keys()) - {"type", *_DEFINITIONS, *_NAMES}
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
    for name in pointer_parts(reference):
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
