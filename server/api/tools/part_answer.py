"""An answer of one choice whose parts follow one another: reasoning, text, calls.

Newer APIs have such answers. A stream tells when a part begins, what it gains, and when it ends.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from model_runtime.request import FinishReason, Output
from model_runtime.tools.answer_reader import ReadingPlan, ReasoningDelta
from model_runtime.tools.call_stream import CallEnd
from server.api.generation_response import HttpAnswer
from server.api.output_queue import Submission
from server.api.service import Service
from server.api.sse import KEEP_ALIVE
from server.api.strict_body import Body
from server.api.tools.choice_reader import ChoiceReader, NumberedCall, NumberedPiece
from server.api.tools.turn_request import TurnRequest

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
