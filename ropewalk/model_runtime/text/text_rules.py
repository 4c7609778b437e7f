"""Rules of answers that are no JSON, in llguidance's form of Lark."""

import json
from collections.abc import Sequence

_ENDS = {"/": "/", "\n": "n", "\r": "r"}  # what ends a rule, as written after a backslash


def regex_rule(pattern: str) -> str:
    """Return the rule of a text that a regular expression matches as a whole.

    `^` at the start and `$` at the end say nothing more, so they are left out.
    """
    pattern = pattern.removeprefix("^")
    before = pattern.removesuffix("$")
    num_escapes = len(before) - len(before.rstrip("\\"))
    if num_escapes % 2 == 0:
        pattern = before
    return f"/(?:{_escaped(pattern)})/"


def choice_rule(choices: Sequence[str]) -> str:
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def grammar_of_rule(rule: str) -> str:
    return f"%llguidance {{}}\nstart: {rule}\n"


def _escaped(pattern: str) -> str:
    """Return the pattern without a bare slash or a line break, which would end the rule."""
    parts, is_escaped = [], False
    for character in pattern:
        backslash = "\\" if character in _ENDS and not is_escaped else ""
        parts.append(backslash + _ENDS.get(character, character))
        is_escaped = character == "\\" and not is_escaped
    return "".join(parts)
