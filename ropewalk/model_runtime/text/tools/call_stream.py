"""Read calls while the model writes them: a name, then its arguments as pieces of JSON.

Only calls that a grammar holds, or that max_tokens cut, are read so: a piece cannot be taken back.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from ropewalk.model_runtime.text.tools.decode_calls import schema_of, typed
from ropewalk.model_runtime.text.tools.json_pieces import JsonPieces, json_text
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


class _Arguments(Protocol):
    """A reader of the arguments of one call."""

    rest: str | None  # the text behind the arguments; None: they go on
    is_broken: bool  # they cannot be read from `rest` on

    def feed(self, text: str) -> str:
        """Return the JSON that more text adds."""


class CallStream:
    """The reader of the calls behind one marker."""

    def __init__(self, found: ToolFormat, tools: Mapping[str, Tool]) -> None:
        self._found = found
        self._tools = tools
        self._begin = re.compile(_beginning(found), re.DOTALL)
        self._arguments: _Arguments | None = None
        self._left = ""
        self.has_begun = False
        self.is_broken = False
        self.rest: str | None = None  # the text behind the calls; None: they go on

    @property
    def is_inside_a_call(self) -> bool:
        return self._arguments is not None

    def feed(self, text: str) -> list[CallEvent]:
        """Return what more text completes. A call whose arguments are no JSON stays as it is."""
        self._left += text
        events: list[CallEvent] = []
        while not self.is_broken and self._advance(events):
            pass
        if self._arguments is None or self.is_broken:
            self._look_for_close()
        return events

    def _advance(self, events: list[CallEvent]) -> bool:
        """Read to the next start or end of a call; return False if there is none yet."""
        if self._arguments is None:
            begun = self._begin.match(self._left)
            if begun is None or begun["name"] not in self._tools:
                return False
            self.has_begun = True
            self._arguments = _READERS[self._found.shape](self._tools[begun["name"]])
            self._left = self._left[begun.end() :]
            events.append(CallStart(begun["name"]))
        piece = self._arguments.feed(self._left)
        self.is_broken = self._arguments.is_broken
        if piece:
            events.append(CallPiece(piece))
        self._left = self._arguments.rest or ""
        if self._arguments.rest is None or self.is_broken:
            return False
        self._arguments = None
        events.append(CallEnd())
        return True

    def _look_for_close(self) -> None:
        close = self._found.close
        if not close:
            return
        _, found, after = self._left.partition(close)
        if found:
            self.rest = after
        elif self.is_broken:
            self._left = self._left[1 - len(close) :]


class _Tagged:
    """Arguments of which each is between tags; a whole one is a piece."""

    def __init__(self, tool: Tool) -> None:
        self._parameters = tool.parameters or {}
        self._left = ""
        self._searched_to = 0  # no end of a value begins before it
        self._names: set[str] = set()
        self.rest: str | None = None
        self.is_broken = False

    def feed(self, text: str) -> str:
        """Return the JSON that more text adds."""
        self._left += text
        pieces = []
        while (begun := _TAG.match(self._left)) is not None:
            if begun["name"] is None:
                self.rest = self._left[begun.end() :]
                pieces.append("}" if self._names else "{}")
                break
            end = self._left.find(_TAG_CLOSE, max(begun.end(), self._searched_to))
            if end < 0:
                self._searched_to = max(0, len(self._left) - len(_TAG_CLOSE) + 1)
                break
            try:
                pieces.append(self._member(begun["name"], self._left[begun.end() : end]))
            except ValueError:  # NaN, or a number beyond float
                self.is_broken, self.rest = True, self._left
                break
            self._left = self._left[end + len(_TAG_CLOSE) :]
            self._searched_to = 0
        return "".join(pieces)

    def _member(self, name: str, raw: str) -> str:
        if name in self._names:
            return ""
        before = ", " if self._names else "{"
        self._names.add(name)
        value = typed(raw, schema_of(self._parameters, name))
        return f"{before}{json_text(name)}: {json_text(value)}"


class _Named:
    """Arguments of Python's syntax whose values are JSON."""

    def __init__(self, _: Tool) -> None:
        self._left = ""
        self._value: JsonPieces | None = None
        self._num = 0
        self.rest: str | None = None
        self.is_broken = False

    def feed(self, text: str) -> str:
        """Return the JSON that more text adds."""
        self._left += text
        pieces: list[str] = []
        while self.rest is None and self._advance(pieces):
            pass
        return "".join(pieces)

    def _advance(self, pieces: list[str]) -> bool:
        if self._value is None:
            begun = _KEYWORD.match(self._left)
            if begun is None:
                return False
            self._left = self._left[begun.end() :]
            if begun["name"] is None:
                self.rest = self._left
                pieces.append("}" if self._num else "{}")
                return False
            pieces.append(f"{', ' if self._num else '{'}{json_text(begun['name'])}: ")
            self._num += 1
            self._value = JsonPieces()
        pieces.append(self._value.feed(self._left))
        if self._value.is_broken:
            self.is_broken, self.rest = True, self._value.rest
            return False
        self._left = self._value.rest or ""
        if self._value.rest is None:
            return False
        self._value = None
        return True


_TAG = re.compile(r"\s*(?:<parameter=(?P<name>[^>\n]+)>\n|</function>)")
_TAG_CLOSE = "\n</parameter>\n"
_KEYWORD = re.compile(r"[\s,]*(?:(?P<name>[^=(),\s]+)=|\))")
_READERS: Mapping[str, Callable[[Tool], _Arguments]] = {
    "json": lambda _: JsonPieces(),
    "named": lambda _: JsonPieces(),
    "tagged": _Tagged,
    "python": _Named,
}


def _beginning(found: ToolFormat) -> str:
    """Return a pattern of all before the arguments of a call, also of one behind another."""
    name = r"(?P<name>[A-Za-z0-9_.-]+)"
    if found.shape == "json":
        key = re.escape(found.arguments_key)
        return rf'[\s\[,}}]*{{\s*"name"\s*:\s*"{name}"\s*,\s*"{key}"\s*:\s*(?=\{{)'
    if found.shape == "tagged":
        return rf"\s*<function={name}>"
    if found.shape == "python":
        return rf"[\s\[,]*{name}\("
    after_marker = found.head.partition(found.marker)[2].strip()
    between = (found.between or "").strip()
    parts = "|".join(re.escape(each) for each in (between, found.marker, after_marker) if each)
    return rf"(?:\s|{parts})*{name}\s*{re.escape(found.middle.strip())}\s*(?=\{{)"


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
