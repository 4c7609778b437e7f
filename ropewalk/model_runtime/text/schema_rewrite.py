"""What the library does not keep of its own keywords, and the form in which it keeps them.

Tried with llguidance 1.9. Each form allows the same values, or a few less. `not_written` finds what
has no such form.
"""

import re
from collections.abc import Mapping
from typing import Any

# It reads numbers as floats, and bounds as 64-bit integers. Of (0, 0.5] and [-0.5, 0) it allows 0.
SIDES = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_LARGEST = 2**53
_FURTHEST = 2**63 - 1024
_LEAST = 1e-30  # between an excluded 0 and the first number
_STEP = 1e-9  # the same of another integer
# It reads these as nothing in a string, because `\u` is not allowed there.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
# A class that has all control characters gets quotes and backslashes, too. So no class has NUL.
# The groups are NUL, a class by its name, another escape, and behind [^ a character that means more
# at the start.
_CLASSES = re.compile(
    r"(\\(?:x00|u0000|U0{8}|[xuU]\{0+\})|\x00)|(\\[pP](?:\{[^}]*\}|\w))|(\\.)"
    r"|\[\^([\]-]?)",
    re.DOTALL,
)
# Of formats it keeps neither total lengths, nor which years have a 29 February, and it allows a
# second 60 in every minute.
_LEAP = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])|(?:{_LEAP})-02-29)"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
_NARROWER: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "date": ({"pattern": _DAY},),
    "time": ({"pattern": f"^{_SECOND}"},),
    "date-time": ({"pattern": _DAY}, {"pattern": f"[Tt]{_SECOND}"}),
    "email": ({"pattern": "^[^@]{1,64}@", "maxLength": 254},),
    "hostname": ({"maxLength": 253},),
}


def not_written(keyword: str, value: Any) -> str | None:
    """Return the words for a bound or a constant that has no form; None if it has one."""
    if keyword in SIDES:
        is_far = value * SIDES[keyword] > _FURTHEST
        return "must be less than 2^63 from 0" if is_far else None
    waiting = [value] if keyword in {"const", "enum"} else []
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str) and _UNWRITABLE.search(each):
            return r"must have no control characters but \b, \t, \n, \f and \r"
        elif isinstance(each, int) and abs(each) > _LARGEST:
            return "must have no integers beyond 2^53"
    return None


def rewrite(schema: dict[str, Any]) -> None:
    """Write a schema's own keywords in the form that the library keeps."""
    if isinstance(schema.get("items"), list):  # the older name of prefixItems
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")
    if "oneOf" in schema:  # alone, the library compares references instead of what they lead to
        schema.setdefault("minProperties", 0)
    for keyword, side in SIDES.items():
        if keyword in schema:
            schema[keyword] = _inwards(schema[keyword], side)
            if keyword.startswith("exclusive"):
                _exclude(schema, keyword, side)
    if "pattern" in schema:
        schema["pattern"] = without_nul(schema["pattern"])
    if "patternProperties" in schema:
        by_name = schema["patternProperties"].items()
        schema["patternProperties"] = {without_nul(name): each for name, each in by_name}
    narrower = _NARROWER.get(schema.get("format", ""), ())
    if narrower:
        schema["allOf"] = [*schema.get("allOf", ()), *narrower]


def _inwards(bound: float, side: int) -> float:
    """Return a bound, or the next one inside that the library reads as it is.

    `side` is 1 for a lower bound, and -1 for an upper one.
    """
    bound = max(bound, -_FURTHEST) if side > 0 else min(bound, _FURTHEST)
    if abs(bound) <= _LARGEST:
        return bound
    near = int(float(bound))
    is_outside = (near - bound) * side < 0
    return near + side * 2 ** (near.bit_length() - 53) if is_outside else near


def _exclude(schema: dict[str, Any], keyword: str, side: int) -> None:
    """Replace an excluded integer by an allowed bound, if the library may allow the integer."""
    if not float(schema[keyword]).is_integer():
        return
    bound = int(schema[keyword])
    if bound * side < 0 and abs(bound) < _LARGEST:
        return  # the library excludes it, as 1 of [0.5, 1)
    del schema[keyword]
    step = _STEP if 0 < abs(bound) <= 10**6 else _LEAST if bound == 0 else 1
    inner = _inwards(bound + side * step, side)
    allowed = "minimum" if side > 0 else "maximum"
    other = schema.get(allowed, inner)
    schema[allowed] = max(inner, other) if side > 0 else min(inner, other)


def without_nul(pattern: str) -> str:
    """Return a pattern whose classes have no NUL, which no string of an answer has."""

    def written(found: re.Match[str]) -> str:
        nul, named, escape, first = found.groups()
        if nul:
            return r"\x01"
        if named:
            return rf"[{named}--\x00]"
        return escape or r"[^\x00" + (f"\\{first}" if first else "")

    return _CLASSES.sub(written, pattern)
