"""The parts of one choice, as its outputs come: text, reasoning, calls, the reason of its end."""

import secrets
import string
from dataclasses import dataclass

from model_runtime.request import FinishReason, Output
from model_runtime.tools.answer_reader import (
    AnswerReader,
    Event,
    ReadingPlan,
    ReasoningDelta,
    TextDelta,
)
from model_runtime.tools.call_stream import CallEnd, CallPiece, CallStart

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
