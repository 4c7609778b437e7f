"""Rules of answers that are no JSON, in llguidance's form of Lark."""

import json
from collections.abc import Sequence


def regex_rule(pattern: str) -> str:
    """Return the rule of a text that a regular expression matches as a whole.

    `^` at the start and `$` at the end say nothing more, so they are left out.
    """
    pattern = pattern.removeprefix("^")
    before = pattern.removesuffix("$")
    num_escapes = len(before) - len(before.rstrip("\\"))
    if num_escapes % 2 == 0:
        pattern = before
    # A slash or a line break would end the rule.
    written = _escaped(pattern).replace("\n", r"\n").replace("\r", r"\r")
    return f"/(?:{written})/"


def choice_rule(choices: Sequence[str]) -> str:
    """Return the rule of a text that is one of some choices."""
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def grammar_of_rule(rule: str) -> str:
    """Return a grammar whose whole text is one rule."""
    return f"%llguidance {{}}\nstart: {rule}\n"


def _escaped(pattern: str) -> str:
    """Return the pattern with a backslash before every slash that has none."""
    parts, is_escaped = [], False
    for character in pattern:
        parts.append("\\/" if character == "/" and not is_escaped else character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(parts)
