"""The keywords of JSON Schema: what a grammar keeps, what restricts nothing, and what is refused.

`kept_schema` writes a client's schema as the library keeps it. Values that are valid under the
result are valid under the client's schema. docs/reference/api.md has the table for clients.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.text.schema_rewrite import SIDES, not_written, rewrite

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMAS = ("items", "additionalProperties")
# keyword -> the type of the values that it restricts; empty: of any type
KEPT: Mapping[str, str] = {
    **dict.fromkeys(("type", "enum", "const", "anyOf", "oneOf", "allOf"), ""),
    **dict.fromkeys(("$ref", "$defs", "definitions", "$id", "$anchor"), ""),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), "object"),
    **dict.fromkeys(("required", "minProperties", "maxProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    "multipleOf": "number",
}
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"), ""),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "dependencies"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), "object"),
    **dict.fromkeys(("uniqueItems", "unevaluatedItems", "contains"), "array"),
    **dict.fromkeys(("minContains", "maxContains"), "array"),
    "x-guidance": "",  # the library's options, which are the server's
}
# Of JSON Schema, OpenAPI and pydantic. So is each other keyword that begins with `x-`.
ANNOTATIONS = frozenset(
    (
        *("$schema", "id", "$comment", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor"),
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
        *("discriminator", "nullable", "example", "externalDocs", "xml", "markdownDescription"),
    )
)
FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        "uri",
    )
)
# The others of the specification. Unknown formats are annotations by it.
REFUSED_FORMATS = frozenset(
    (
        *("iri", "iri-reference", "uri-reference", "uri-template", "idn-email", "idn-hostname"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
# Values of refused keywords under which every value is valid. Zod writes some of them.
_EVERY: tuple[Any, ...] = (True, {})
_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (*_EVERY, {"type": "string"}),
    "unevaluatedProperties": _EVERY,
    "unevaluatedItems": _EVERY,
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
# Keywords that do nothing without another one.
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_PATTERNS = {"pattern", "patternProperties"}
# Each escape, so that the parts behind it are not read as another, each look-around, and classes
# that the library does not keep (`schema_rewrite.py`).
_ESCAPES_AND_LOOKS = re.compile(r"\\(.)|\(\?<?[=!]|\[:(?:cntrl|\^\w+):\]", re.DOTALL)


def kept_schema(
    schema: Mapping[str, Any], field: str = "response_format", *, is_lenient: bool = False
) -> dict[str, Any]:
    """Return the schema without what restricts nothing, in the form that the grammar keeps.

    Raises RequestError for the first keyword that is wrong or not kept. It names the request's
    `field`, the keyword and its place. `is_lenient` leaves out keywords that are not kept.
    """
    root = dict(schema)
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:  # no recursion: schemas may be deep
        path, found = waiting.pop()
        if isinstance(found, bool):
            continue
        for keyword, told in _problems(found, is_lenient=is_lenient):
            raise _refused(field, keyword, path, told)
        rewrite(found)
        waiting += [((*path, *place), part) for place, part, _ in copy_parts(found)]
    return root


def _problems(schema: dict[str, Any], *, is_lenient: bool) -> Iterator[tuple[str, str]]:
    """Remove what restricts nothing; yield each keyword that is wrong or not kept, and why.

    `is_lenient` removes keywords that are not kept, too.
    """
    for keyword in [each for each in schema if _restricts_nothing(each, schema)]:
        del schema[keyword]
    for keyword, value in schema.items():
        told, is_right = _VALUES.get(keyword, ("", None))
        if is_right is not None and not is_right(value):
            yield keyword, f"must be {told}"
    for keyword in list(schema):
        if told := _not_kept(keyword, schema):
            if is_lenient:
                del schema[keyword]
            else:
                yield keyword, told


def _restricts_nothing(keyword: str, found: Mapping[str, Any]) -> bool:
    """Return whether every value is valid under a keyword of a schema."""
    value, types = found[keyword], found.get("type")
    if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword not in REFUSED):
        return True
    if value in _NO_EFFECT.get(keyword, ()) or _NEEDS.get(keyword, keyword) not in found:
        return True
    if keyword == "format" and isinstance(value, str) and value not in FORMATS | REFUSED_FORMATS:
        return True
    if keyword == "additionalItems" and not isinstance(found.get("items"), list):
        return True
    of_type = KEPT.get(keyword) or REFUSED.get(keyword)
    if not of_type or types is None:
        return False
    named = ["number" if each == "integer" else each for each in _listed(types)]
    return of_type not in named


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    return bool(value) and all(each in _TYPES for each in _listed(value))


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_reference(value: Any) -> bool:
    """Return whether a reference may lead to a schema: values of other keywords are not checked."""
    parts = pointer_parts(value) if isinstance(value, str) else ("",)
    at = 0
    while at < len(parts) and parts[at] in {*SCHEMAS, *LISTS_OF_SCHEMAS, *SCHEMAS_BY_NAME}:
        at += 1 if parts[at] in SCHEMAS else 2
    return at == len(parts)


def pointer_parts(reference: str) -> tuple[str, ...]:
    """Return the names on the way that a reference points along."""
    found = unquote(reference.partition("#")[2]).split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# keyword -> what its value has to be, in words and as a check
_VALUES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one of {', '.join(_TYPES)}, or a list of them", _is_type),
    "enum": ("a list of values", lambda value: isinstance(value, list) and bool(value)),
    "required": ("a list of names", _are_names),
    "multipleOf": ("a number > 0", lambda value: _is_number(value) and value > 0),
    **dict.fromkeys(_COUNTS, ("an integer >= 0", _is_count)),
    **dict.fromkeys(SIDES, ("a number", _is_number)),
    **dict.fromkeys(("pattern", "format", "$id", "$anchor"), ("a string", _is_text)),
    "$ref": ("a reference to a schema", _is_reference),
    **dict.fromkeys(SCHEMAS_BY_NAME, ("an object of schemas", _are_named)),
    **dict.fromkeys(LISTS_OF_SCHEMAS, ("a list of schemas", _are_schemas)),
    **dict.fromkeys(SCHEMAS, ("a schema", _is_schema)),
    "additionalItems": ("a schema", _is_schema),
    "items": ("a schema, or a list of them", lambda value: all(map(_is_schema, _listed(value)))),
}


def _not_kept(keyword: str, schema: Mapping[str, Any]) -> str:
    """Return the words for what no grammar keeps; empty if it is kept."""
    value, told = schema[keyword], ""
    if keyword not in KEPT:
        told = "is not supported"
    elif keyword == "format" and value in REFUSED_FORMATS:
        told = f"must be one of {', '.join(sorted(FORMATS))}. Given: {value}"
    elif keyword in _PATTERNS and any(map(_is_beyond_grammars, _texts(value))):
        told = r"must have no look-around, \b, back-references, [:cntrl:] or [:^...:]"
    elif keyword == "minProperties":
        # A grammar does not detect repeated names.
        if value > max(1, len(set(schema.get("required", ())))):
            told = "must be at most 1, or what `required` names"
    else:
        told = not_written(keyword, value) or ""
    return told


def _texts(value: str | Mapping[str, Any]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _is_beyond_grammars(pattern: str) -> bool:
    """Return whether a pattern depends on other text, or has all control characters in a class."""
    found = _ESCAPES_AND_LOOKS.finditer(pattern)
    return any(each[1] is None or each[1] in "bB123456789" for each in found)


def copy_parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Replace the direct subschemas by copies; yield the place of each, the copy, the original."""
    for keyword in SCHEMAS:
        original = schema.get(keyword)
        if _is_schema(original):
            schema[keyword] = _copied(original)
            yield (keyword,), schema[keyword], original
    for keyword in (*LISTS_OF_SCHEMAS, *SCHEMAS_BY_NAME):
        held: Any = schema.get(keyword)
        if not isinstance(held, list if keyword in LISTS_OF_SCHEMAS else Mapping):
            continue
        copies: Any = list(held) if isinstance(held, list) else dict(held)
        schema[keyword] = copies
        for at in range(len(held)) if isinstance(held, list) else held:
            if _is_schema(held[at]):
                copies[at] = _copied(held[at])
                yield (keyword, str(at)), copies[at], held[at]


def _copied(schema: Any) -> Any:
    return dict(schema) if isinstance(schema, Mapping) else schema


def _refused(field: str, keyword: str, path: Sequence[str], problem: str) -> RequestError:
    place = ".".join(("$", *path))[:200]
    return RequestError(
        f"`{field}`: the keyword {keyword[:64]!a} {problem} (at {place!a})", param=field
    )
