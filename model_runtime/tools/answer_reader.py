"""Split a growing answer into text, reasoning and tool calls.

The parts do not depend on how the text was cut into pieces. Text is held back only while it may
belong to a marker, and inside a call. A call that cannot be read is text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from model_runtime.text.detokenizer import overlap
from model_runtime.tools.decode_calls import decode_calls, is_inside_a_string
from model_runtime.tools.tool_format import ReasoningFormat, Tool, ToolCall, ToolFormat


class TextDelta(NamedTuple):
    """More of the answer's text."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of the reasoning."""

    text: str


Event = TextDelta | ReasoningDelta | ToolCall


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """The parts that an answer may have; both None: it is text."""

    tool_format: ToolFormat | None = None
    tools: Mapping[str, Tool] | None = None  # those that may be called, by name
    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False  # the prompt ends with the opening marker


class _State(Enum):
    TEXT = 1
    REASONING = 2
    CALL = 3


class AnswerReader:
    """The reader of one answer."""

    def __init__(self, plan: ReadingPlan) -> None:
        self._plan = plan
        self._state = _State.REASONING if plan.begins_in_reasoning else _State.TEXT
        self._buffer = ""  # text that is not yet an event
        self._has_text = False  # since the start or the last marker
        self._skips_space = plan.begins_in_reasoning  # after a marker
        self._body_at = 0  # in the buffer: the end of a call's marker
        self._searched_to = 0  # in the buffer: no close begins before it
        self.num_calls = 0
        self.num_unparsed = 0
        self.num_cut = 0

    @property
    def is_reasoning(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._state is _State.REASONING

    def feed(self, text: str) -> list[Event]:
        """Return what more text completes."""
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return _merged(events)

    def finish(self, *, is_cut: bool) -> list[Event]:
        """Return the rest at the answer's end. `is_cut`: max_tokens ended it."""
        events: list[Event] = []
        if self._state is _State.CALL:
            self._end_call(events, is_cut=is_cut)
        self._emit(events, self._buffer)
        self._buffer = ""
        return _merged(events)

    def _step(self, events: list[Event]) -> bool:
        """Handle the next part of the buffer; return whether to go on."""
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        if not self._buffer:
            return False
        if self._state is _State.REASONING:
            return self._read_reasoning(events)
        if self._state is _State.CALL:
            return self._read_call(events)
        return self._read_text(events)

    def _read_reasoning(self, events: list[Event]) -> bool:
        assert self._plan.reasoning is not None
        close = self._plan.reasoning.close
        before, found, after = self._buffer.partition(close)
        if found:
            self._emit(events, before.rstrip())
            self._begin(_State.TEXT, after)
            return True
        settled = self._buffer[: len(self._buffer) - overlap(self._buffer, close)].rstrip()
        self._emit(events, settled)
        self._buffer = self._buffer[len(settled) :]
        return False

    def _read_text(self, events: list[Event]) -> bool:
        at, state, marker = self._next_marker()
        if state is None:
            held = max((overlap(self._buffer, each) for each in self._markers()), default=0)
            settled = self._buffer[: len(self._buffer) - held]
            if self._plan.tool_format is not None:
                settled = settled.rstrip()  # it is no text if a call follows
            if settled.strip():
                self._emit(events, settled)
                self._buffer = self._buffer[len(settled) :]
            return False
        if state is _State.REASONING:
            self._begin(state, self._buffer[at + len(marker) :])
            return True
        settled = self._buffer[:at].rstrip()
        self._emit(events, settled)
        self._buffer = self._buffer[len(settled) :]
        self._state = state
        self._body_at = self._searched_to = at - len(settled) + len(marker)
        return True

    def _markers(self) -> list[str]:
        """Return what may follow the text so far."""
        found = []
        if self._plan.tool_format is not None and self._plan.tool_format.marker:
            found.append(self._plan.tool_format.marker)
        if self._plan.reasoning is not None and not self._has_text:
            found.append(self._plan.reasoning.open)
        return found

    def _next_marker(self) -> tuple[int, _State | None, str]:
        """Return where the first marker in the buffer is, what it begins, and its text."""
        start = len(self._buffer) - len(self._buffer.lstrip())
        reasoning, tool_format = self._plan.reasoning, self._plan.tool_format
        may_reason = reasoning is not None and not self._has_text
        if reasoning and may_reason and self._buffer.startswith(reasoning.open, start):
            return start, _State.REASONING, reasoning.open
        if tool_format is None:
            return 0, None, ""
        if tool_format.marker:
            at = self._buffer.find(tool_format.marker)
            return (at, _State.CALL, tool_format.marker) if at >= 0 else (0, None, "")
        # An answer that is a call from its first character on.
        is_first = not self._has_text and not self.num_calls
        if is_first and self._buffer[start : start + 1] in {*_OPENERS[tool_format.shape]}:
            return start, _State.CALL, ""
        return 0, None, ""

    def _read_call(self, events: list[Event]) -> bool:
        tool_format = self._plan.tool_format
        assert tool_format is not None
        body = self._buffer[self._body_at :].lstrip()
        if body and not self._may_begin(body):
            self._give_up(events, self._body_at)
            return True
        if not tool_format.close:
            return False
        end = self._buffer.find(tool_format.close, self._searched_to)
        if end < 0:
            self._searched_to = max(self._body_at, len(self._buffer) - len(tool_format.close) + 1)
            return False
        if self._take_calls(events, end):
            self._begin(_State.TEXT, self._buffer[end + len(tool_format.close) :])
            return True
        if is_inside_a_string(tool_format, self._buffer[self._body_at : end]):
            self._searched_to = end + 1
            return True
        self.num_unparsed += 1
        self._give_up(events, end + len(tool_format.close))
        return True

    def _may_begin(self, body: str) -> bool:
        """Return whether a call may begin so. If not, the marker was only mentioned."""
        tool_format = self._plan.tool_format
        assert tool_format is not None
        openers = _OPENERS[tool_format.shape]
        if openers and tool_format.marker:
            return body[0] in openers
        if tool_format.shape == "json":
            # Nothing marks a call but its first key; other JSON is an answer.
            begun = "".join(body[:_LEAD_LEN].split())
            keys = ("name", "type", tool_format.arguments_key)
            leads = [f'{{"{key}":' for key in keys]
            return any(each.startswith(begun) or begun.startswith(each) for each in leads)
        if openers:
            return body[0] in openers
        rest = tool_format.head.partition(tool_format.marker)[2].strip()
        names = [rest] if rest else list(self._plan.tools or ())
        return any(each.startswith(body) or body.startswith(each) for each in names)

    def _take_calls(self, events: list[Event], end: int) -> bool:
        """Add the calls before `end`; return False if there are none that can be read."""
        assert self._plan.tool_format is not None
        text = self._buffer[self._body_at : end]
        calls = decode_calls(self._plan.tool_format, text, self._plan.tools or {})
        if calls is None:
            return False
        events += calls
        self.num_calls += len(calls)
        return True

    def _end_call(self, events: list[Event], *, is_cut: bool) -> None:
        """Take a call that the answer's end closes, or leave it as text."""
        assert self._plan.tool_format is not None
        may_end = not self._plan.tool_format.close or not is_cut
        if may_end and self._take_calls(events, len(self._buffer)):
            self._buffer = ""
        elif is_cut:
            self.num_cut += 1
        else:
            self.num_unparsed += 1
        self._state = _State.TEXT

    def _give_up(self, events: list[Event], end: int) -> None:
        """Let the buffer up to `end` be text."""
        self._state, self._has_text = _State.TEXT, True
        self._emit(events, self._buffer[:end])
        self._buffer = self._buffer[end:]

    def _begin(self, state: _State, rest: str) -> None:
        """Go on after a marker."""
        self._state, self._buffer = state, rest
        self._has_text, self._skips_space = False, True

    def _emit(self, events: list[Event], text: str) -> None:
        if not text:
            return
        if self._state is _State.REASONING:
            events.append(ReasoningDelta(text))
        else:
            events.append(TextDelta(text))
            self._has_text = True


_LEAD_LEN = 64  # characters that show whether JSON is a call
# First characters of a call after the marker; empty: see the head.
_OPENERS = {"json": "{[", "named": "", "tagged": "", "python": "["}


def _merged(events: list[Event]) -> list[Event]:
    """Join neighbours of one kind."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            found[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + event.text)
        else:
            found.append(event)
    return found
