"""Patterns of the whitespace that a structured answer may contain in one place.

A pattern is a regular expression. It may match JSON's whitespace only, and a bounded number of
it, so that every answer is JSON and no model repeats spaces until its budget ends.
"""

import re

ONE_SPACE = "[ ]?"  # the default
NONE = ""
ANY = r"[\x20\x0A\x0D\x09]{1,32}"

_LONGEST_PATTERN = 64  # characters
# Spaces, tabs and line breaks, as themselves or escaped; classes, groups, bounded repeats.
_PARTS = re.compile(
    r"(?:[ \t\n\r\[\]()|?]|\\[tnr]|\\x(?:20|09|0[aAdD])|\{\d{1,2}(?:,\d{1,2})?\})*", re.ASCII
)


def checked_whitespace(pattern: str) -> str:
    """Return the pattern. Raises ValueError if it could match anything but bounded whitespace."""
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"must be at most {_LONGEST_PATTERN} characters, got {len(pattern)}")
    if not _PARTS.fullmatch(pattern):
        raise ValueError(
            "may contain spaces, \\t, \\n and \\r only, with [], (), |, ? and bounds such as {0,4}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return pattern
