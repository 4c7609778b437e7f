"""The answers of /v1/chat/completions."""

from typing import Literal

from pydantic import Field

from ropewalk.server.api.parts.logprobs import PROMPT_LOGPROBS, ChatLogprobs, PromptLogprobs
from ropewalk.server.api.parts.usage import AnswerHead, PromptProgressAnswer, TimingsAnswer, Usage
from ropewalk.server.api.rope_schema import RopeAnswer
from ropewalk.server.api.strict_body import Body, is_none


class AnswerFunction(Body):
    """The function of a call in an answer."""

    name: str = Field(examples=["get_weather"])
    """The name of one of the request's tools."""
    arguments: str = Field(examples=['{"city": "Rome"}'])
    """The arguments, a JSON object as text."""


class AnswerCall(Body):
    """A call in an answer."""

    id: str = Field(examples=["aB3dE5fG7"])
    """Nine letters and digits, which the result names."""
    type: Literal["function"] = "function"
    """The kind of the tool."""
    function: AnswerFunction
    """The function and its arguments."""


class DeltaFunction(Body):
    """The function of a call that begins or goes on."""

    name: str | None = Field(None, exclude_if=is_none, examples=["get_weather"])
    """The name, in the first piece only."""
    arguments: str = Field(examples=['{"city": '])
    """The next piece of the arguments."""


class DeltaCall(Body):
    """A piece of a call."""

    index: int = Field(examples=[0])
    """Index of the call in the answer."""
    id: str | None = Field(None, exclude_if=is_none, examples=["aB3dE5fG7"])
    """The id, in the first piece only."""
    type: Literal["function"] | None = Field(None, exclude_if=is_none)
    """The kind of the tool, in the first piece only."""
    function: DeltaFunction
    """The next piece of the call."""


class AnswerMessage(Body):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    """The model."""
    content: str | None = Field(examples=["There was a rope."])
    """The text, or null beside calls."""
    refusal: None = Field(None, examples=[None])
    """Null, because no answer is a refusal."""
    reasoning_content: str | None = Field(None, exclude_if=is_none, examples=["They ask for one."])
    """The reasoning. Absent if there is none (docs/guide/tools.md#reasoning)."""
    reasoning: str | None = Field(None, exclude_if=is_none, examples=["They ask for one."])
    """The same as `reasoning_content`."""
    tool_calls: list[AnswerCall] | None = Field(None, exclude_if=is_none)
    """The calls. Absent if there are none."""


class Delta(Body):
    """A piece of the message."""

    role: Literal["assistant"] | None = Field(None, exclude_if=is_none)
    """The model, in the first event of a choice only."""
    content: str | None = Field(None, exclude_if=is_none, examples=[" was"])
    """The next piece of the text."""
    reasoning_content: str | None = Field(None, exclude_if=is_none, examples=["They"])
    """The next piece of the reasoning."""
    reasoning: str | None = Field(None, exclude_if=is_none, examples=["They"])
    """The same as `reasoning_content`."""
    tool_calls: list[DeltaCall] | None = Field(None, exclude_if=is_none)
    """The next pieces of calls (docs/guide/tools.md#streams)."""


class ChatChoice(Body):
    """One answer."""

    index: int = Field(examples=[0])
    """Index of the answer."""
    message: AnswerMessage
    """The message of the model."""
    logprobs: ChatLogprobs | None = None
    """The logprobs of the text's tokens, or null."""
    finish_reason: str | None = Field(None, examples=["stop"])
    """`stop`, `length` or `tool_calls` (docs/guide/tools.md#answers), or null while the answer goes
    on."""
    rope: RopeAnswer
    """The scaling that was applied."""
    token_ids: list[int] | None = Field(None, exclude_if=is_none, examples=[[220, 290]])
    """The tokens of the text. Absent without `return_token_ids`."""


class ChunkChoice(Body):
    """One piece of an answer."""

    index: int = Field(examples=[0])
    """Index of the answer."""
    delta: Delta
    """The next piece of the model's message."""
    logprobs: ChatLogprobs | None = None
    """The logprobs of the text's tokens, or null."""
    finish_reason: str | None = Field(None, examples=["stop"])
    """`stop`, `length` or `tool_calls` (docs/guide/tools.md#answers), or null while the answer goes
    on."""
    rope: RopeAnswer
    """The scaling that was applied."""
    token_ids: list[int] | None = Field(None, exclude_if=is_none, examples=[[220, 290]])
    """The tokens of the text. Absent without `return_token_ids`."""


class ChatResponse(AnswerHead):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    """The kind of the object."""
    choices: list[ChatChoice]
    """The answers."""
    usage: Usage
    """Token counts."""
    timings: TimingsAnswer | None = Field(None, exclude_if=is_none)
    """Times of the answer. Absent without `timings_per_token`."""
    prompt_logprobs: PromptLogprobs | None = Field(
        None, exclude_if=is_none, examples=[PROMPT_LOGPROBS]
    )
    """For each token of the prompt an object by token id, and null for the first. Absent without
    `prompt_logprobs`."""
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none, examples=[[1, 50]])
    """The tokens of the prompt, in the first event of a stream. Absent without
    `return_token_ids`."""


class ChatChunk(AnswerHead):
    """Each event of its stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    """The kind of the object."""
    choices: list[ChunkChoice]
    """Pieces of answers, or none in an event that has counts or progress only."""
    usage: Usage | None = None
    """Token counts, or null (`stream_options`)."""
    timings: TimingsAnswer | None = Field(None, exclude_if=is_none)
    """Times of the answer. Absent without `timings_per_token`."""
    prompt_progress: PromptProgressAnswer | None = Field(None, exclude_if=is_none)
    """How far a long prompt is. Absent without `return_progress`."""
    prompt_token_ids: list[int] | None = Field(None, exclude_if=is_none, examples=[[1, 50]])
    """The tokens of the prompt, in the first event of a stream. Absent without
    `return_token_ids`."""
