"""Read calls while the model writes them: a name, then its arguments as pieces of JSON.

A whole text is one piece. A call that a grammar holds is sent as it is read, because a piece cannot
be taken back; other calls may turn out to be text, so their reader waits (`answer_reader.py`).
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple

from ropewalk.model_runtime.text.tools.argument_schema import is_text
from ropewalk.model_runtime.text.tools.json_pieces import (
    PYTHON_WORDS,
    GrowingText,
    Pieces,
    Waiting,
    joined,
    json_text,
)
from ropewalk.model_runtime.text.tools.tool_format import Tool, ToolCall, ToolFormat


class CallStart(NamedTuple):
    """A call of this function begins."""

    name: str


class CallPiece(NamedTuple):
    """More of the call's arguments, as JSON."""

    text: str


class CallEnd(NamedTuple):
    """The call is whole."""


CallEvent = CallStart | CallPiece | CallEnd
_Parts = Generator[CallStart | str | CallEnd | None, None, None]


def whole_calls(events: Iterable[object]) -> list[ToolCall]:
    """Return the calls of events that are whole, with their arguments read."""
    calls: list[ToolCall] = []
    name, pieces = "", list[str]()
    for event in events:
        if isinstance(event, CallStart):
            name, pieces = event.name, []
        elif isinstance(event, CallPiece):
            pieces.append(event.text)
        elif isinstance(event, CallEnd):
            calls.append(ToolCall(name, json.loads("".join(pieces))))
    return calls


class CallStream:
    """The reader of the calls behind one marker."""

    def __init__(self, found: ToolFormat, tools: Mapping[str, Tool]) -> None:
        self._found = found
        self._tools = tools
        self._argument_keys = {found.arguments_key, "arguments", "parameters"}
        self._text = GrowingText()
        self._parts = self._calls()
        self.has_begun = False
        self.is_inside_a_call = False
        self.is_broken = False  # the text is no call; it goes up to the close unread
        self.rest: str | None = None  # the text behind the calls; None: they go on

    @property
    def looks_like_calls(self) -> bool:
        """Return whether some of the text was read as the beginning of a call."""
        return self._text.has_moved

    def feed(self, text: str) -> list[CallEvent]:
        """Return what more text completes."""
        self._text.add(text)
        events: list[CallEvent] = []
        pieces: list[str] = []
        for part in self._parts:
            if isinstance(part, str):
                pieces.append(part)
                continue
            if pieces:
                events.append(CallPiece("".join(pieces)))
                pieces.clear()
            if part is None:
                return events
            events.append(part)
            self.has_begun = True
            self.is_inside_a_call = isinstance(part, CallStart)
        self.rest = self._text.left
        return events

    def _calls(self) -> _Parts:
        """Read calls up to the close. Without one, they run to the end of the answer."""
        try:
            yield from self._calls_and_close()
        except (ValueError, RecursionError):
            self.is_broken = True
            while not self._found.close:
                yield None
            yield from self._text.until(self._found.close)

    def _calls_and_close(self) -> _Parts:
        found = self._found
        after_marker = found.head.replace(found.marker, "", 1)
        read_call, between = {
            "json": (self._json_call, ("[", ",", "]")),
            "python": (self._python_call, ("[", ",", "]")),
            "tagged": (self._tagged_call, ()),
            "named": (self._named_call, (found.between or "", found.marker, after_marker)),
        }[found.shape]
        skipped = [found.close, *(each.strip() for each in between)]
        if not found.marker:
            yield from self._json_lead() if found.shape == "json" else self._text.one_of("[")
        while True:
            part = yield from self._text.any_of(*filter(None, skipped))
            if part and part == found.close:
                break
            if not part:
                yield from read_call()
        if not self.has_begun:
            raise ValueError("no call")

    def _json_lead(self) -> Waiting[None]:
        """Wait for the first name of an object that calls have. Other JSON is an answer."""
        leads = [f'{{"{key}"' for key in ("name", "type", self._found.arguments_key)]
        while not (begun := "".join(self._text.left[:_LEAD_LEN].split())).startswith((*leads,)):
            if not any(each.startswith(begun) for each in leads):
                raise ValueError("another object")
            yield None

    def _json_call(self) -> _Parts:
        """Read an object. Arguments in front of the name come when the object is whole."""
        text, name = self._text, ""
        arguments: str | None = None
        yield from text.one_of("{")
        is_over = False
        while not is_over:
            key = json.loads((yield from joined(text.string())))
            yield from text.one_of(":")
            if key == "name":
                name = json.loads((yield from joined(text.string())))
                if name not in self._tools:
                    raise ValueError("no tool")
            elif arguments is not None or key not in self._argument_keys:
                yield from joined(text.value())
            elif name:
                arguments = ""
                yield from self._arguments(name)
            else:
                arguments = yield from joined(self._object())
            is_over = (yield from text.one_of(",", "}")) == "}"
        if not name or arguments is None:
            raise ValueError("no call")
        if arguments:
            yield CallStart(name)
            yield arguments
            yield CallEnd()

    def _named_call(self) -> _Parts:
        name = yield from self._text.word(_NAME, self._tools)
        if self._found.middle.strip():
            yield from self._text.one_of(self._found.middle.strip())
        yield from self._arguments(name)

    def _arguments(self, name: str) -> _Parts:
        yield from self._text.next_char()
        yield CallStart(name)
        yield from self._object()
        yield CallEnd()

    def _object(self) -> Pieces:
        """Read an object, which some models write as a text."""
        char = yield from self._text.next_char()
        if char == "{":
            yield from self._text.value()
            return
        value = json.loads(json.loads((yield from joined(self._text.string()))))
        if not isinstance(value, dict):
            raise ValueError("no object")  # noqa: TRY004  # one error for all wrong text
        yield json_text(value)

    def _tagged_call(self) -> _Parts:
        """Read arguments of which each is between tags. A whole one is a piece."""
        text, names = self._text, set[str]()
        yield from text.one_of("<function=")
        tool = self._tools[(yield from text.word(_NAME, self._tools))]
        yield from text.one_of(">")
        yield CallStart(tool.name)
        while (yield from text.one_of("<parameter=", "</function>")) == "<parameter=":
            name = (yield from text.until(">")).strip()
            is_line = yield from text.begins_with("\n")
            raw = yield from text.until("\n</parameter>\n" if is_line else "</parameter>")
            if name not in names:
                value = json_text(typed(raw.removeprefix("\n"), schema_of(tool, name)))
                yield f"{', ' if names else '{'}{json_text(name)}: {value}"
                names.add(name)
        yield "}" if names else "{}"
        yield CallEnd()

    def _python_call(self) -> _Parts:
        """Read named arguments in Python's syntax."""
        text, names = self._text, set[str]()
        tool = self._tools[(yield from text.word(_NAME, self._tools))]
        yield from text.one_of("(")
        yield CallStart(tool.name)
        is_over = bool((yield from text.any_of(")")))
        while not is_over:
            name = yield from text.word(_KEYWORD)
            yield from text.one_of("=")
            yield f"{', ' if names else '{'}{json_text(name)}: "
            names.add(name)
            schema = schema_of(tool, name)
            if (yield from text.next_char()) in "\"'" and _is_no_text(schema):
                raw = json.loads((yield from joined(text.string())))
                yield json_text(typed(raw, schema))  # some models quote every value
            else:
                yield from text.value()
            is_over = (yield from text.one_of(",", ")")) == ")"
        yield "}" if names else "{}"
        yield CallEnd()


_LEAD_LEN = 64  # characters that show whether JSON is a call
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_KEYWORD = re.compile(r"[^=(),\s]+")


def schema_of(tool: Tool, name: str) -> Any:
    """Return the schema of a tool's argument; None if it has none."""
    properties = (tool.parameters or {}).get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _is_no_text(schema: Any) -> bool:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return isinstance(kinds, list) and "string" not in kinds


def typed(raw: str, schema: Any) -> Any:
    """Return a value without quotes: a string as it is, anything else as JSON if it is JSON."""
    if is_text(schema):
        return raw
    try:
        return json.loads(PYTHON_WORDS.get(raw.strip(), raw))
    except ValueError:
        return raw


class NewCalls:
    """A filter of calls. A call is held back while it may become one of the calls before it."""

    def __init__(self) -> None:
        self._whole: list[tuple[str, str]] = []  # name and arguments of the calls so far
        self._name = ""
        self._pieces: list[str] = []
        self._num_characters = 0  # of the pieces
        self._alike: list[str] = []  # arguments of calls before that begin with the pieces
        self._held: list[CallEvent] | None = None  # None: the call differs from all before it
        self.num_repeated = 0
        self.is_repeating = False  # the last whole call was left out, and no new one has begun

    def passed(self, event: CallEvent) -> list[CallEvent]:
        """Return the events that are known to belong to a new call."""
        if isinstance(event, CallStart):
            self._name, self._pieces, self._held, self._num_characters = event.name, [], [], 0
            self._alike = [arguments for name, arguments in self._whole if name == event.name]
        elif isinstance(event, CallPiece):
            self._pieces.append(event.text)
            # Only the new piece is compared: a whole call in pieces would cost its square.
            at = self._num_characters
            self._alike = [each for each in self._alike if each.startswith(event.text, at)]
            self._num_characters += len(event.text)
        is_whole = isinstance(event, CallEnd)
        is_repeated = is_whole and any(len(each) == self._num_characters for each in self._alike)
        if is_whole and not is_repeated:
            self._whole.append((self._name, "".join(self._pieces)))
        if self._held is None:
            return [event]
        self._held.append(event)
        if is_repeated:
            self._held = None
            self.num_repeated += 1
            self.is_repeating = True
            return []
        if self._alike and not is_whole:
            return []
        self.is_repeating = False
        held, self._held = self._held, None
        return held
