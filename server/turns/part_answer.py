"""An answer of one choice whose parts follow one another: reasoning, text, calls.

Newer APIs have such answers. A stream tells when a part begins, what it gains, and when it ends.
"""

import secrets
import string
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from ropewalk.model_runtime.request import FinishReason, Output
from ropewalk.model_runtime.text.tools.answer_reader import (
    AnswerReader,
    Event,
    ReadingPlan,
    ReasoningDelta,
    TextDelta,
)
from ropewalk.model_runtime.text.tools.call_stream import CallEnd, CallPiece, CallStart
from ropewalk.server.api.generation_response import HttpAnswer
from ropewalk.server.api.output_queue import KEEP_ALIVE, Submission
from ropewalk.server.api.service import Service
from ropewalk.server.api.strict_body import Body
from ropewalk.server.api.turn_request import TurnRequest

# Mistral's chat templates refuse ids of another length.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LEN = 9


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call that begins, with the id and index under which a client knows it."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class NumberedPiece:
    """More of the arguments of a call, as JSON."""

    index: int
    text: str


PartEvent = TextDelta | ReasoningDelta | NumberedCall | NumberedPiece | CallEnd


@dataclass(frozen=True, slots=True)
class ChoiceParts:
    """All parts of an answer."""

    text: str
    reasoning: str
    calls: list[tuple[NumberedCall, str]]  # with the arguments as JSON, of a cut one up to there


class ChoiceReader:
    """The reader of one choice. Outputs go in; parts are taken out, at once or at the end."""

    def __init__(self, plan: ReadingPlan, *, is_named: bool) -> None:
        """`is_named`: the client named the one function to call."""
        self._reader = AnswerReader(plan)
        self._is_named = is_named
        self._events: list[Event] = []
        self._num_numbered = 0
        self.num_reasoning_tokens = 0

    def read(self, output: Output) -> None:
        """Read one output."""
        was_reasoning = self._reader.is_reasoning
        events = self._reader.feed(output.text) if output.text else []
        if was_reasoning or self._reader.is_reasoning:
            self.num_reasoning_tokens += len(output.token_ids)
        reason = output.finish_reason
        if reason is not None:
            events += self._reader.finish(is_cut=reason is not FinishReason.STOP)
        self._events += events

    def take(self) -> ChoiceParts:
        """Return the parts of all outputs, joined."""
        events = self.take_in_order()
        pieces = [event for event in events if isinstance(event, NumberedPiece)]
        return ChoiceParts(
            "".join(event.text for event in events if isinstance(event, TextDelta)),
            "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
            [
                (call, "".join(piece.text for piece in pieces if piece.index == call.index))
                for call in events
                if isinstance(call, NumberedCall)
            ],
        )

    def take_in_order(self) -> list[PartEvent]:
        """Return the parts since the last time, in the order in which the model wrote them."""
        events, self._events = self._events, []
        return [self._numbered(event) for event in events]

    def _numbered(self, event: Event) -> PartEvent:
        if isinstance(event, CallStart):
            self._num_numbered += 1
            return NumberedCall(self._num_numbered - 1, _new_id(), event.name)
        if isinstance(event, CallPiece):
            return NumberedPiece(self._num_numbered - 1, event.text)
        return event

    def finish_reason(self, output: Output) -> str | None:
        """Return OpenAI's finish reason; `length` wins, and a named function ends with `stop`."""
        reason = output.finish_reason
        if reason is FinishReason.STOP and self._reader.num_calls and not self._is_named:
            return "tool_calls"
        return None if reason is None else reason.value

    def outcomes(self) -> dict[str, int]:
        """Return how many calls were read, were cut, could not be read, or were left out."""
        reader = self._reader
        return {
            "ok": reader.num_calls,
            "cut": reader.num_cut,
            "unparsed": reader.num_unparsed,
            "repeated": reader.num_repeated,
        }


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LEN))


Change = Literal["begun", "grown", "ended"]
BodyT = TypeVar("BodyT", bound=Body)


@dataclass(slots=True)
class Part:
    """One part of an answer."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    call: NumberedCall | None = None
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False  # max_tokens ended it, or a call is not whole

    @property
    def text(self) -> str:
        """Return the text so far; of a call, its arguments."""
        return "".join(self.pieces)


class PartAnswer(HttpAnswer[TurnRequest], Generic[BodyT]):
    """An answer as a list of parts; subclasses give them the shape of their API."""

    always_has_text: ClassVar[bool] = False  # an answer without text and calls has an empty text

    def __init__(
        self,
        service: Service,
        submission: Submission,
        asked: TurnRequest,
        plan: ReadingPlan | None,
        received: BodyT,
    ) -> None:
        """`plan`: how the answer is read; None: it is text. `received`: the client's body."""
        super().__init__(service, submission, asked)
        self.received = received
        self.parts: list[Part] = []
        self.reader = ChoiceReader(plan or ReadingPlan(), is_named=False)
        self.listener = self._read
        self._open: Part | None = None

    def _read(self, _: int, output: Output) -> None:
        self.reader.read(output)
        if output.finish_reason is not None:
            self.service.metrics.tool_calls(self.reader.outcomes())

    @abstractmethod
    def complete(self, output: Output) -> dict[str, Any]:
        """Return the whole answer, after its last output."""

    @abstractmethod
    def begun(self, part: Part) -> bytes:
        """Return the events of a part that begins."""

    @abstractmethod
    def grown(self, part: Part, text: str) -> bytes:
        """Return the events of a part that gains a text."""

    @abstractmethod
    def ended(self, part: Part) -> bytes:
        """Return the events of a part that is over."""

    @abstractmethod
    def closed(self, output: Output) -> bytes:
        """Return the events of the answer's end, for its last output."""

    def whole_body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        for _ in self.changes(outputs[0]):
            pass
        return self.complete(outputs[0])

    async def output_events(self, _: int, output: Output) -> bytes:
        """Return the events of one output, or a comment while a call is held back."""
        events = []
        for change, part, text in self.changes(output):
            if change == "begun":
                events.append(self.begun(part))
            elif change == "grown":
                events.append(self.grown(part, text))
            else:
                events.append(self.ended(part))
        if output.finish_reason is not None:
            events.append(self.closed(output))
        return b"".join(events) or KEEP_ALIVE

    def changes(self, output: Output) -> Iterator[tuple[Change, Part, str]]:
        """Make and yield the changes of the parts by what was read up to this output."""
        for event in self.reader.take_in_order():
            if isinstance(event, NumberedCall):
                yield from self._ending()
                yield from self._beginning("call", event)
                continue
            if isinstance(event, NumberedPiece):
                yield from self._growing(event.text)
                continue
            if isinstance(event, CallEnd):
                yield from self._ending(ends_call=True)
                continue
            kind: Literal["reasoning", "text"] = (
                "reasoning" if isinstance(event, ReasoningDelta) else "text"
            )
            if self._open is not None and self._open.kind != kind:
                yield from self._ending()
            if self._open is None:
                yield from self._beginning(kind)
            yield from self._growing(event.text)
        if output.finish_reason is None:
            return
        if self.always_has_text and all(part.kind == "reasoning" for part in self.parts):
            yield from self._ending()
            yield from self._beginning("text")
        yield from self._ending(is_cut=output.finish_reason is FinishReason.LENGTH)

    def _beginning(
        self, kind: Literal["reasoning", "text", "call"], call: NumberedCall | None = None
    ) -> Iterator[tuple[Change, Part, str]]:
        self._open = Part(kind, len(self.parts), call)
        self.parts.append(self._open)
        yield "begun", self._open, ""

    def _growing(self, text: str) -> Iterator[tuple[Change, Part, str]]:
        assert self._open is not None
        self._open.pieces.append(text)
        yield "grown", self._open, text

    def _ending(
        self, *, is_cut: bool = False, ends_call: bool = False
    ) -> Iterator[tuple[Change, Part, str]]:
        if self._open is not None:
            part, self._open = self._open, None
            part.is_cut = is_cut if part.call is None else not ends_call
            yield "ended", part, ""
