"""Answers whose choices have parts that follow one another: reasoning, text, calls.

A stream tells when a part begins, what it gains, and when it ends. Each API has its own shape of
that: chat's deltas, or the typed events of newer APIs.
"""

import hashlib
import string
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
from ropewalk.server.api.generation_schema import GenerationRequest
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


Change = Literal["begun", "grown", "ended"]
Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Part:
    """One part of an answer."""

    kind: Kind
    index: int
    call: NumberedCall | None = None
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False  # max_tokens ended it, or a call is not whole

    @property
    def text(self) -> str:
        """Return the text so far; of a call, its arguments."""
        return "".join(self.pieces)


class ChoiceReader:
    """The reader of one choice. Outputs go in; the changes of its parts come out, at any time."""

    def __init__(self, plan: ReadingPlan, answer_id: str, *, is_named: bool) -> None:
        """`answer_id`: decides the ids of calls. `is_named`: the client named the function."""
        self._reader = AnswerReader(plan)
        self._answer_id = answer_id
        self._is_named = is_named
        self._events: list[Event] = []
        self._num_numbered = 0
        self._open: Part | None = None
        self.parts: list[Part] = []
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

    def take(self, output: Output) -> list[Part]:
        """Return the parts of the whole answer; `output` is the last one."""
        for _ in self.changes(output):
            pass
        return self.parts

    def changes(
        self, output: Output, *, always_has_text: bool = False
    ) -> Iterator[tuple[Change, Part, str]]:
        """Make and yield the changes of the parts by what was read up to this output.

        `always_has_text`: an answer without text and calls ends with an empty text.
        """
        events, self._events = self._events, []
        for event in map(self._numbered, events):
            if isinstance(event, NumberedCall):
                yield from self._ending()
                yield self._begun("call", event)
                continue
            if isinstance(event, NumberedPiece):
                yield self._grown(event.text)
                continue
            if isinstance(event, CallEnd):
                yield from self._ending(ends_call=True)
                continue
            kind: Kind = "reasoning" if isinstance(event, ReasoningDelta) else "text"
            if self._open is not None and self._open.kind != kind:
                yield from self._ending()
            if self._open is None:
                yield self._begun(kind)
            yield self._grown(event.text)
        if output.finish_reason is None:
            return
        if always_has_text and all(part.kind == "reasoning" for part in self.parts):
            yield from self._ending()
            yield self._begun("text")
        yield from self._ending(is_cut=self.end(output) is FinishReason.LENGTH)

    def _begun(self, kind: Kind, call: NumberedCall | None = None) -> tuple[Change, Part, str]:
        self._open = Part(kind, len(self.parts), call)
        self.parts.append(self._open)
        return "begun", self._open, ""

    def _grown(self, text: str) -> tuple[Change, Part, str]:
        assert self._open is not None
        self._open.pieces.append(text)
        return "grown", self._open, text

    def _ending(
        self, *, is_cut: bool = False, ends_call: bool = False
    ) -> Iterator[tuple[Change, Part, str]]:
        if self._open is not None:
            part, self._open = self._open, None
            part.is_cut = is_cut if part.call is None else not ends_call
            yield "ended", part, ""

    def _numbered(self, event: Event) -> PartEvent:
        if isinstance(event, CallStart):
            index, self._num_numbered = self._num_numbered, self._num_numbered + 1
            return NumberedCall(index, _call_id(self._answer_id, index), event.name)
        if isinstance(event, CallPiece):
            return NumberedPiece(self._num_numbered - 1, event.text)
        return event

    def finish_reason(self, output: Output) -> str | None:
        """Return OpenAI's finish reason; `length` wins, and a named function ends with `stop`."""
        reason = self.end(output)
        if reason is FinishReason.STOP and self._reader.num_calls and not self._is_named:
            return "tool_calls"
        return None if reason is None else reason.value

    def end(self, output: Output) -> FinishReason | None:
        """Return why the answer ended. A limit that cut only repeated calls is no reason."""
        reason = output.finish_reason
        is_whole = reason is FinishReason.LENGTH and self._reader.has_cut_repeats
        return FinishReason.STOP if is_whole else reason

    def outcomes(self) -> dict[str, int]:
        """Return how many calls were read, were cut, could not be read, or were left out."""
        reader = self._reader
        return {
            "ok": reader.num_calls,
            "cut": reader.num_cut,
            "unparsed": reader.num_unparsed,
            "repeated": reader.num_repeated,
        }


def _call_id(answer_id: str, index: int) -> str:
    """Return the id of an answer's call, the same in each run of the answer."""
    number = int.from_bytes(hashlib.sha256(f"{answer_id} {index}".encode()).digest())
    found = []
    for _ in range(_ID_LEN):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        found.append(_ID_CHARACTERS[digit])
    return "".join(found)


AskedT = TypeVar("AskedT", bound=GenerationRequest)
BodyT = TypeVar("BodyT", bound=Body)
Told = TypeVar("Told")


class PartAnswer(HttpAnswer[AskedT], Generic[AskedT, Told]):
    """An answer that is read into parts; subclasses make events of the changes."""

    always_has_text: ClassVar[bool] = False  # an answer without text and calls has an empty text

    def __init__(
        self,
        service: Service,
        submission: Submission,
        body: AskedT,
        plan: ReadingPlan | None,
        *,
        is_named: bool = False,
    ) -> None:
        """`plan`: how the choices are read; None: they are not. `is_named`: of ChoiceReader."""
        super().__init__(service, submission, body)
        self.readers: list[ChoiceReader] = []  # by choice, if they are read
        if plan is not None:
            self.readers = [
                ChoiceReader(plan, f"{self.own_id} {index}", is_named=is_named)
                for index in range(len(submission.requests))
            ]
            self.listener = self._read

    def _read(self, index: int, output: Output) -> None:
        reader = self.readers[index]
        reader.read(output)
        if output.finish_reason is not None:
            self.service.metrics.tool_calls(reader.outcomes())

    @abstractmethod
    def begun(self, part: Part) -> Told | None:
        """Return what tells of a part that begins; None: nothing does."""

    @abstractmethod
    def grown(self, part: Part, text: str) -> Told:
        """Return what tells of a part that gains a text."""

    @abstractmethod
    def ended(self, part: Part) -> Told | None:
        """Return what tells of a part that is over; None: nothing does."""

    def told(self, index: int, output: Output) -> list[Told]:
        """Return what tells of the changes of a choice up to this output, the growth at once."""
        found: list[Told] = []
        changes = self.readers[index].changes(output, always_has_text=self.always_has_text)
        for is_growth, each in groupby(changes, lambda change: change[0] == "grown"):
            if is_growth:
                grown = list(each)
                found.append(self.grown(grown[0][1], "".join(text for _, _, text in grown)))
                continue
            for change, part, _ in each:
                of_part = self.begun(part) if change == "begun" else self.ended(part)
                if of_part is not None:
                    found.append(of_part)
        return found


class EventAnswer(PartAnswer[TurnRequest, bytes], Generic[BodyT]):
    """An answer of one choice, whose stream has typed events, as newer APIs have it."""

    def __init__(
        self,
        service: Service,
        submission: Submission,
        asked: TurnRequest,
        plan: ReadingPlan | None,
        received: BodyT,
    ) -> None:
        """`plan`: how the answer is read; None: it is text. `received`: the client's body."""
        super().__init__(service, submission, asked, plan or ReadingPlan())
        self.received = received
        (self.reader,) = self.readers

    @property
    def parts(self) -> list[Part]:
        return self.reader.parts

    @abstractmethod
    def complete(self, output: Output) -> dict[str, Any]:
        """Return the whole answer, after its last output."""

    @abstractmethod
    def closed(self, output: Output) -> bytes:
        """Return the events of the answer's end, for its last output."""

    def whole_body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        for _ in self.reader.changes(outputs[0], always_has_text=self.always_has_text):
            pass
        return self.complete(outputs[0])

    async def output_events(self, index: int, output: Output) -> bytes:
        """Return the events of one output, or a comment while a call is held back."""
        events = self.told(index, output)
        if output.finish_reason is not None:
            events.append(self.closed(output))
        return b"".join(events) or KEEP_ALIVE
