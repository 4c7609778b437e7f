"""The answer of /v1/messages: an object with blocks, or a stream of typed events."""

import json
from typing import Any

from pydantic_core import from_json

from model_runtime.errors import RequestError, RopewalkError
from model_runtime.request import FinishReason, Output
from server.api.messages.message_schema import (
    MessageBody,
    MessagesRequest,
    MessageUsage,
    ThinkingTokens,
)
from server.api.sse import event
from server.api.tools.part_answer import Part, PartAnswer

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageAnswer(PartAnswer[MessagesRequest]):
    """An answer in the format of Anthropic's Messages."""

    _has_begun = False

    def complete(self, output: Output) -> dict[str, Any]:
        return self._message(output)

    def silent_event(self) -> bytes:
        return _event("ping")

    async def output_events(self, index: int, output: Output) -> bytes:
        """Return the events of one output; the first tells how much of the prompt was cached."""
        events = await super().output_events(index, output)
        if self._has_begun:
            return events
        self._has_begun = True
        return _event("message_start", message=self._message(None)) + events

    def begun(self, part: Part) -> bytes:
        return _event("content_block_start", index=part.index, content_block=_block(part))

    def grown(self, part: Part, text: str) -> bytes:
        kind, name = _DELTAS[part.kind]
        return _event("content_block_delta", index=part.index, delta={"type": kind, name: text})

    def ended(self, part: Part) -> bytes:
        return _event("content_block_stop", index=part.index)

    def closed(self, output: Output) -> bytes:
        """Return the events of the end."""
        message = self._message(output)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        end = _event("message_delta", delta=delta, usage=message["usage"], rope=message["rope"])
        return end + _event("message_stop")

    def error_events(self, error: RopewalkError) -> bytes:
        kind = "invalid_request_error" if isinstance(error, RequestError) else "api_error"
        return _event("error", error={"type": kind, "message": str(error)})

    def _message(self, output: Output | None) -> dict[str, Any]:
        """Build the object; `output`: the last one, at the end."""
        counts = self.usage()
        cached = counts.prompt_tokens_details.cached_tokens
        return MessageBody(
            id=self.request_id,
            model=self.model,
            content=[] if output is None else [_block(part) for part in self.parts],
            stop_reason=None if output is None else self._stop_reason(output),
            stop_sequence=None if output is None else self._stop_sequence(output),
            usage=MessageUsage(
                input_tokens=counts.prompt_tokens - cached,
                cache_read_input_tokens=cached,
                output_tokens=counts.completion_tokens,
                output_tokens_details=ThinkingTokens(
                    thinking_tokens=self.reader.num_reasoning_tokens
                ),
            ),
            skipped_tools=self.received.skipped or None,
            rope=None if output is None else self.rope(0, output),
        ).model_dump()

    def _stop_reason(self, output: Output) -> str:
        if output.finish_reason is FinishReason.LENGTH:
            # The body has the max_tokens that there was room for.
            had_room = self.body.max_tokens == self.received.max_tokens
            return "max_tokens" if had_room else "model_context_window_exceeded"
        if any(part.kind == "call" and not part.is_cut for part in self.parts):
            return "tool_use"
        return "end_turn" if self._stop_sequence(output) is None else "stop_sequence"

    def _stop_sequence(self, output: Output) -> str | None:
        """Return the client's stop string that ended the answer, not one of the chat template."""
        asked = self.received.stop_sequences or ()
        return output.stop_string if output.stop_string in asked else None


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _block(part: Part) -> dict[str, Any]:
    """Return a block; one that begins has no text yet."""
    if part.call is not None:
        # Anthropic's client reads the pieces of a cut call so, too.
        text = part.text or "{}"
        arguments = from_json(text, allow_partial=True) if part.is_cut else json.loads(text)
        named = {"id": part.call.call_id, "name": part.call.name}
        return {"type": "tool_use", **named, "input": arguments}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}
