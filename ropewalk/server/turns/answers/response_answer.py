"""The answer of /v1/responses."""

from typing import Any, Literal

from pydantic import Field

from ropewalk.server.api.rope_schema import RopeAnswer
from ropewalk.server.api.strict_body import Body, is_none

_MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "A rope.", "annotations": [], "logprobs": []}],
}


class InputTokensDetails(Body):
    """The source of the input's keys and values."""

    cached_tokens: int = Field(examples=[64])
    """Tokens of the input that were found in the prefix cache."""
    cache_write_tokens: int = 0
    """Always 0, because the server does not count them."""


class OutputTokensDetails(Body):
    """The parts of the answer."""

    reasoning_tokens: int = Field(examples=[0])
    """Tokens of the reasoning."""


class ResponseUsage(Body):
    """Token counts."""

    input_tokens: int = Field(examples=[80])
    """Tokens of the prompt."""
    input_tokens_details: InputTokensDetails
    """Where the input's keys and values come from."""
    output_tokens: int = Field(examples=[160])
    """Generated tokens, end tokens included."""
    output_tokens_details: OutputTokensDetails
    """Parts of the answer."""
    total_tokens: int = Field(examples=[240])
    """Both together."""


class ResponseBody(Body):
    """The answer of /v1/responses. Items are objects of OpenAI's shapes."""

    id: str = Field(examples=["resp_4f2a90c1d3b74f2a90c1d3b74f2a90c1"])
    """The id of the answer."""
    object: Literal["response"] = "response"
    """The kind of the object."""
    created_at: int = Field(examples=[1764288000])
    """Unix time of the request."""
    completed_at: int | None = Field(None, examples=[1764288002])
    """Unix time of the end, or null."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """`incomplete` is an answer that `max_output_tokens` or the context ended."""
    error: dict[str, Any] | None = Field(None, examples=[None])
    """The error of an answer that failed, or null."""
    incomplete_details: dict[str, Any] | None = Field(
        None, examples=[{"reason": "max_output_tokens"}]
    )
    """The `reason` why an answer is incomplete, or null."""
    instructions: str | None = Field(examples=["Answer in one sentence."])
    """The request's field."""
    max_output_tokens: int | None = Field(examples=[100])
    """The request's field."""
    model: str = Field(examples=["ropewalk-demo"])
    """The served name."""
    output: list[dict[str, Any]] = Field(examples=[[_MESSAGE]])
    """Items `reasoning`, `message` and `function_call`, in the order in which the model wrote them.
    An answer without text and calls has an empty message."""
    parallel_tool_calls: bool
    """The request's field."""
    previous_response_id: None = Field(None, examples=[None])
    """Null, because nothing is stored."""
    background: Literal[False] = False
    """False, because nothing is stored."""
    store: Literal[False] = False
    """False, because nothing is stored."""
    reasoning: dict[str, Any] = Field(examples=[{"effort": None, "summary": None}])
    """The request's field."""
    temperature: float = Field(examples=[0.7])
    """The temperature that was used."""
    top_p: float = Field(examples=[0.9])
    """The `top_p` that was used."""
    text: dict[str, Any] = Field(examples=[{"format": {"type": "text"}}])
    """The request's field."""
    tool_choice: str | dict[str, Any] = Field(examples=["auto"])
    """The request's field."""
    tools: list[dict[str, Any]] = Field(examples=[[]])
    """The functions of the request."""
    skipped_tools: list[str] | None = Field(None, exclude_if=is_none, examples=[["web_search"]])
    """Types of the request's tools that are not served. Absent if there are none."""
    top_logprobs: Literal[0] = 0
    """Always 0."""
    truncation: Literal["disabled"] = "disabled"
    """Always `disabled`."""
    service_tier: Literal["default"] = "default"
    """Always `default`."""
    metadata: dict[str, str] = Field(examples=[{"run": "7"}])
    """The request's field."""
    prompt_cache_key: str | None = Field(examples=["key-1"])
    """The request's field."""
    safety_identifier: str | None = Field(examples=["user-1"])
    """The request's field."""
    user: str | None = Field(examples=["user-1"])
    """The request's field."""
    usage: ResponseUsage | None = None
    """Token counts, at the end."""
    rope: RopeAnswer | None = None
    """The scaling that was applied, at the end."""
