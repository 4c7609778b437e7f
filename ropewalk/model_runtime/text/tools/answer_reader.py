"""Split a growing answer into text, reasoning and tool calls.

The parts do not depend on how the text was cut into pieces. Text is held back only while it may
belong to a marker, and inside a call that no grammar holds. Such a call may turn out to be text,
because it cannot be read. Calls that a grammar holds come as they are written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ropewalk.model_runtime.text.detokenizer import overlap
from ropewalk.model_runtime.text.tools.call_stream import (
    CallEnd,
    CallEvent,
    CallPiece,
    CallStream,
    NewCalls,
)
from ropewalk.model_runtime.text.tools.tool_format import ReasoningFormat, Tool, ToolFormat


class TextDelta(NamedTuple):
    """More of the answer's text."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of the reasoning."""

    text: str


Event = TextDelta | ReasoningDelta | CallEvent


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """The parts that an answer may have; both None: it is text."""

    tool_format: ToolFormat | None = None
    tools: Mapping[str, Tool] | None = None  # those that may be called, by name
    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False  # the prompt ends with the opening marker
    is_held: bool = False  # a grammar holds the calls, so one that begins is one


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
        self._read_to = 0  # in the buffer: the end of what the stream has read
        self._stream: CallStream | None = None  # of the calls behind a marker
        self._waiting: list[CallEvent] = []  # of calls that may turn out to be text
        self._new_calls = NewCalls()
        self.num_calls = 0
        self.num_unparsed = 0
        self.num_cut = 0
        self.has_cut_repeats = False  # max_tokens cut nothing but calls that were left out

    @property
    def num_repeated(self) -> int:
        """Return how many calls were left out, because they equal an earlier one."""
        return self._new_calls.num_repeated

    @property
    def is_reasoning(self) -> bool:
        return self._state is _State.REASONING

    def feed(self, text: str) -> list[Event]:
        """Return what more text completes."""
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return _merged(events)

    def finish(self, *, is_cut: bool) -> list[Event]:
        """Return the rest at the answer's end. `is_cut`: max_tokens ended it.

        A call without an end in the events is cut. No part of one is text beside whole calls.
        """
        events: list[Event] = []
        if self._state is _State.CALL:
            self._end_call(events, is_cut=is_cut)
        elif self._state is _State.TEXT and is_cut and self.num_calls:
            self._buffer = self._buffer[: len(self._buffer) - self._held_len()].rstrip()
        self._emit(events, self._buffer)
        self._buffer = ""
        is_other = self._has_text or self._state is _State.REASONING
        self.has_cut_repeats = is_cut and self._new_calls.is_repeating and not is_other
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
            return self._read_calls(events)
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
            settled = self._buffer[: len(self._buffer) - self._held_len()]
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
        self._body_at = self._read_to = at - len(settled) + len(marker)
        assert self._plan.tool_format is not None
        self._stream = CallStream(self._plan.tool_format, self._plan.tools or {})
        return True

    def _held_len(self) -> int:
        """Return how many characters at the buffer's end may begin a marker."""
        return max((overlap(self._buffer, each) for each in self._markers()), default=0)

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
        is_first = not self._has_text and not self.num_calls and start < len(self._buffer)
        return (start, _State.CALL, "") if is_first else (0, None, "")

    def _read_calls(self, events: list[Event]) -> bool:
        """Read more of calls, or find that they are none; return whether to go on."""
        assert self._stream is not None
        self._waiting += self._stream.feed(self._buffer[self._read_to :])
        self._read_to = len(self._buffer)
        is_sent = self._plan.is_held and self._stream.has_begun
        if self._stream.is_broken and not is_sent:
            self.num_unparsed += self._stream.looks_like_calls
            self._give_up(events)
            return True
        if is_sent:
            self._buffer, self._read_to = "", 0  # no part of it becomes text
        if is_sent or self._stream.rest is not None:
            self._send(events)
        if self._stream.rest is None:
            return False
        self.num_unparsed += self._stream.is_inside_a_call
        self._begin(_State.TEXT, self._stream.rest)
        return True

    def _send(self, events: list[Event]) -> None:
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            passed = self._new_calls.passed(event)
            self.num_calls += CallEnd() in passed
            events += passed

    def _end_call(self, events: list[Event], *, is_cut: bool) -> None:
        """Take a call that the answer's end closes or cuts, or leave it as text."""
        assert self._stream is not None
        is_inside = self._stream.is_inside_a_call
        is_sent = self._plan.is_held and self._stream.has_begun
        is_taken = is_sent or (self._stream.has_begun and (is_cut or not is_inside))
        if is_taken:
            self._send(events)
        elif is_cut:
            self._new_calls.is_repeating = False  # the rest may be another call
        if is_inside or not is_taken:
            self.num_cut += is_cut
            self.num_unparsed += not is_cut
        if is_taken or (is_cut and self.num_calls):
            self._buffer = ""
        self._state = _State.TEXT

    def _give_up(self, events: list[Event]) -> None:
        """Let the marker of calls be text."""
        self._state, self._has_text, self._waiting = _State.TEXT, True, []
        self._emit(events, self._buffer[: self._body_at])
        self._buffer = self._buffer[self._body_at :]

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


def _merged(events: list[Event]) -> list[Event]:
    """Join neighbours of one kind."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        for kind in (TextDelta, ReasoningDelta, CallPiece):
            if isinstance(event, kind) and isinstance(last, kind):
                found[-1] = kind(last.text + event.text)
                break
        else:
            found.append(event)
    return found
