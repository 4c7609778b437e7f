"""The tables of fields in docs/reference/api.md: `python -m tests.api_page` writes them.

`tests/test_docs.py` holds the page to them. A table stands below `<!-- fields of Name -->`. With
`beside Other` it leaves out the fields that Other describes in the same words.
"""

import re
from dataclasses import replace
from pathlib import Path

from ropewalk.server.api.completion_schema import CompletionRequest
from ropewalk.server.api.parts.usage import PromptProgressAnswer
from ropewalk.server.api.rope_schema import RopeAnswer, RopeField
from ropewalk.server.api.strict_body import Body
from ropewalk.server.api.structured_schema import StructuredOutputs
from ropewalk.server.playground.schema_words import PREFIX, FieldRow, field_rows
from ropewalk.server.turns.chat_schema import ChatRequest, Message
from ropewalk.server.turns.message_schema import MessagesRequest
from ropewalk.server.turns.response_schema import ResponsesRequest

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/api.md"
BODIES: dict[str, type[Body]] = {
    body.__name__: body
    for body in (
        *(CompletionRequest, RopeField, RopeAnswer, ChatRequest, Message, ResponsesRequest),
        *(MessagesRequest, StructuredOutputs, PromptProgressAnswer),
    )
}
_ONLY = "Accepted only with these values, which have no effect."
_LAST = ("A hint without", "Accepted")
_MARK = re.compile(r"(<!-- fields of (\w+)(?: beside (\w+))? -->\n)(?:\|.*\n)*")
_PATH = re.compile(r"docs/((\w+/)([\w-]+)\.md(?:#([\w-]+))?)")


def _rows(body: type[Body]) -> list[FieldRow]:
    """The fields of a body, the required ones first, and last those without effect."""
    rows = field_rows(body.model_json_schema(ref_template=f"{PREFIX}{{model}}"))
    if body.__name__.endswith("Answer"):
        rows = (replace(row, is_required=False) for row in rows)
    return sorted(rows, key=lambda row: (not row.is_required, row.text.startswith(_LAST)))


def _kind(row: FieldRow) -> str:
    """Type and limits in a reader's words."""
    named = re.sub(r"\{\w+\}(?: or \{\w+\})*", "object", row.kind).removesuffix(" or null")
    return ", ".join(filter(None, [named, row.limits, "required" * row.is_required]))


def _link(found: re.Match[str]) -> str:
    """A page that a description names, as a link from this one."""
    target, folder, page, anchor = found.groups()
    if page == "api":
        return f"[{anchor.replace('-', ' ')}](#{anchor})"
    return (
        f"[{page}.md]({target.removeprefix(folder) if folder == 'reference/' else '../' + target})"
    )


def table(name: str, other: str | None = None) -> str:
    """The fields of a body; those with equal words share a row."""
    left_out = {(row.name, row.text) for row in _rows(BODIES[other])} if other else set()
    rows = [row for row in _rows(BODIES[name]) if (row.name, row.text) not in left_out]
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        kind, text = _kind(row), row.text
        if text == f"Accepted only as {kind}, which has no effect.":
            names.setdefault(("", _ONLY), []).append(f"`{row.name}`: {kind}")
        else:
            names.setdefault((kind, text), []).append(f"`{row.name}`")
    lines = ["| field | type, limits | description |", "|---|---|---|"]
    lines += [
        f"| {', '.join(alike)} | {kind} | {_PATH.sub(_link, text)} |"
        for (kind, text), alike in names.items()
    ]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with its tables as they should be."""
    return _MARK.sub(lambda found: found[1] + table(found[2], found[3]), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
