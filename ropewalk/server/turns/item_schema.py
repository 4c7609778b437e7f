"""The items of `input`: messages, calls, results, reasoning; and as a chat template reads them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ropewalk.server.api.strict_body import Body, FirstMistakes, other_kind
from ropewalk.server.turns.tool_schema import (
    FunctionName,
    arguments_of,
    call_for_template,
    problem_of_arguments,
)

_MAX_ITEMS = 4096
Id = Annotated[str, Field(min_length=1, max_length=256, examples=["call_1"])]
Status = Literal["in_progress", "completed", "incomplete"]
# Fields of calls, which other servers set for tools of theirs.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "caller": (None, {"type": "direct"}),
    "namespace": (None,),
    "async": (None, False),
}


class ContentPart(Body):
    """A part of a message, or of a call's result."""

    type: Literal["input_text", "output_text"]
    """The type of the part."""
    text: str = Field(examples=["Tell me a story."])
    """The text."""
    annotations: list[Any] | None = Field(None, examples=[[]])
    """A field of an answer that is sent back; it has no effect."""
    logprobs: list[Any] | None = Field(None, examples=[[]])
    """A field of an answer that is sent back; it has no effect."""
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, examples=[{"ttl": "1h"}])
    """A hint without effect. Every prefix is cached."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in ("input_text", "output_text"):
            raise other_kind(
                "type", "must be input_text or output_text; images and files are not supported"
            )
        return value


Content = str | Annotated[list[ContentPart], Field(fail_fast=True), FirstMistakes]


class MessageItem(Body):
    """A message."""

    type: Literal["message"] | None = "message"
    """The type of the item, which may be left out."""
    role: Literal["user", "assistant", "system", "developer"]
    """The speaker. `developer` is the same as `system`."""
    content: Content = Field(examples=["Tell me a story."])
    """A text, or parts of it, which are joined with line breaks."""
    id: Id | None = Field(None, examples=["msg_1"])
    """The id of an answer's item that is sent back, without effect."""
    status: Status | None = None
    """A field of an answer that is sent back; it has no effect."""
    phase: Literal["commentary", "final_answer"] | None = None
    """A hint without effect."""


class CallItem(Body):
    """A call of an earlier answer."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    type: Literal["function_call"]
    """The type of the item."""
    call_id: Id
    """The id, which its result names."""
    name: FunctionName
    """The name of the function."""
    arguments: str = Field(examples=['{"city": "Rome"}'])
    """A JSON object as text, with each name once, without NaN, and nested at most 64 deep. No text,
    or whitespace, is an empty object."""
    id: Id | None = Field(None, examples=["msg_1"])
    """The id of an answer's item that is sent back, without effect."""
    status: Status | None = None
    """A field of an answer that is sent back; it has no effect."""
    caller: dict[str, Any] | None = None
    namespace: str | None = None
    async_: bool | None = Field(None, alias="async")

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from problem_of_arguments("arguments", self.arguments)


class ResultItem(Body):
    """The result of a call."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    type: Literal["function_call_output"]
    """The type of the item."""
    call_id: Id
    """The call of an earlier item whose result this is."""
    output: Content = Field(examples=["sunny"])
    """The result: a text, or parts of it."""
    id: Id | None = Field(None, examples=["msg_1"])
    """The id of an answer's item that is sent back, without effect."""
    status: Status | None = None
    """A field of an answer that is sent back; it has no effect."""
    name: str | None = Field(None, examples=["get_weather"])
    """A hint without effect, because the call has the name."""
    caller: dict[str, Any] | None = None
    namespace: str | None = None
    async_: bool | None = Field(None, alias="async")


class SummaryText(Body):
    """A part of a reasoning item's summary."""

    type: Literal["summary_text"]
    """The type of the part."""
    text: str = Field(examples=["They ask for a story."])
    """The text."""


class ReasoningText(Body):
    """A part of a reasoning item's content."""

    type: Literal["reasoning_text"]
    """The type of the part."""
    text: str = Field(examples=["They ask for a story."])
    """The text."""


class ReasoningItem(Body):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    """The type of the item."""
    summary: list[SummaryText] | None = None
    """The reasoning in short, which is read if there is no `content`."""
    content: list[ReasoningText] | None = None
    """The reasoning, whose parts are joined with line breaks."""
    encrypted_content: str | None = Field(None, examples=[None])
    """The reasoning of another server, which cannot be read and changes nothing."""
    id: Id | None = Field(None, examples=["msg_1"])
    """The id of an answer's item that is sent back, without effect."""
    status: Status | None = None
    """A field of an answer that is sent back; it has no effect."""

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


_TAGS = {
    "message": "a-message",
    "function_call": "a-call",
    "function_call_output": "a-result",
    "reasoning": "a-reasoning",
}


def _kind_of_item(value: Any) -> str | None:
    if isinstance(value, dict):
        kind = value.get("type") or "message"
        return _TAGS.get(kind) if isinstance(kind, str) else None
    return _TAGS.get(getattr(value, "type", ""), "a-message")


Item = Annotated[
    Annotated[MessageItem, Tag("a-message")]
    | Annotated[CallItem, Tag("a-call")]
    | Annotated[ResultItem, Tag("a-result")]
    | Annotated[ReasoningItem, Tag("a-reasoning")],
    Discriminator(
        _kind_of_item,
        custom_error_type="shape",
        custom_error_message=(
            f"must be an item whose type is one of {', '.join(_TAGS)}; the server has no built-in "
            "tools, and stores no items to refer to"
        ),
    ),
]


def _text_only(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("shape", "must be a string or a list of items")
    return value


Input = Annotated[
    Annotated[str, BeforeValidator(_text_only), Tag("a-text")]
    | Annotated[
        list[Item],
        Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True),
        FirstMistakes,
        Tag("a-list"),
    ],
    Discriminator(lambda value: "a-list" if isinstance(value, list) else "a-text"),
]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def problems_of_results(items: Sequence[Item]) -> Iterator[tuple[str, str]]:
    """Yield the first result of a call that no item before it has."""
    known: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, CallItem):
            known.add(item.call_id)
        elif isinstance(item, ResultItem) and item.call_id not in known:
            told = f"[{index}].call_id must name a function_call before it"
            yield "input", f"{told}. Given: {item.call_id[:64]!a}"
            return


def messages_of(instructions: str | None, given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """Return the conversation in the shape that chat templates read.

    Templates want one system message at the start and one assistant's message a turn. So leading
    system messages are joined, and calls and reasoning become fields of the assistant's message.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    reasoning = ""  # belongs to what the assistant says next
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning = "\n".join(filter(None, [reasoning, item.text]))
            continue
        is_call = isinstance(item, CallItem)
        is_said = isinstance(item, MessageItem) and item.role == "assistant"
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        if is_said or reasoning or (is_call and not continues):
            content = text_of(item.content) if isinstance(item, MessageItem) and is_said else ""
            messages.append({"role": "assistant", "content": content})
            if reasoning:
                messages[-1]["reasoning_content"], reasoning = reasoning, ""
        if isinstance(item, CallItem):
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, ResultItem):
            content = text_of(item.output)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif not is_said:
            _add_plain(messages, item)
    if reasoning:
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    return messages


def _add_plain(messages: list[dict[str, Any]], item: MessageItem) -> None:
    role = "user" if item.role == "user" else "system"
    content = text_of(item.content)
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{content}"
    else:
        messages.append({"role": role, "content": content})


def _call(item: CallItem) -> dict[str, Any]:
    return call_for_template(item.call_id, item.name, json.loads(arguments_of(item.arguments)))
