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
from model_runtime.tools.decode_calls import arguments_text
from model_runtime.tools.tool_format import ToolCall

# Mistral's chat templates refuse ids of another length.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LEN = 9


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call with the id and index under which a client knows it."""

    index: int
    call_id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class ChoiceParts:
    """Parts of an answer: all of it, or what one output added."""

    text: str
    reasoning: str
    calls: list[NumberedCall]


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
        """Return the parts since the last call."""
        events = self.take_in_order()
        return ChoiceParts(
            "".join(event.text for event in events if isinstance(event, TextDelta)),
            "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
            [event for event in events if isinstance(event, NumberedCall)],
        )

    def take_in_order(self) -> list[TextDelta | ReasoningDelta | NumberedCall]:
        """Return the same in the order in which the model wrote it."""
        events, self._events = self._events, []
        found: list[TextDelta | ReasoningDelta | NumberedCall] = []
        for event in events:
            if isinstance(event, ToolCall):
                found.append(
                    NumberedCall(self._num_numbered, _new_id(), event.name, arguments_text(event))
                )
                self._num_numbered += 1
            else:
                found.append(event)
        return found

    def finish_reason(self, output: Output) -> str | None:
        """Return OpenAI's finish reason; `length` wins, and a named function ends with `stop`."""
        reason = output.finish_reason
        if reason is FinishReason.STOP and self._reader.num_calls and not self._is_named:
            return "tool_calls"
        return None if reason is None else reason.value

    def outcomes(self) -> dict[str, int]:
        """Return how many calls were read, were cut, or could not be read."""
        reader = self._reader
        return {"ok": reader.num_calls, "cut": reader.num_cut, "unparsed": reader.num_unparsed}


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LEN))
