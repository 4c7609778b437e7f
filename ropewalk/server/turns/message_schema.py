"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ropewalk.model_runtime.sampling_limits import SAMPLING_LIMITS
from ropewalk.model_runtime.text.tools.tool_format import Tool
from ropewalk.server.api.generation_schema import MAX_STOP_STRINGS, StopString
from ropewalk.server.api.parts.request_fields import ModelField, RequestFields
from ropewalk.server.api.rope_schema import INT64, RopeAnswer
from ropewalk.server.api.strict_body import Body, FirstMistakes, is_none
from ropewalk.server.api.structured_schema import SCHEMA_EXAMPLE
from ropewalk.server.turns.block_schema import (
    BlockMessage,
    TextBlocks,
    ToolName,
    ToolUseBlock,
    problems_of_results,
)
from ropewalk.server.turns.chat_schema import TemplateFields
from ropewalk.server.turns.tool_schema import (
    MAX_TOOLS,
    PARAMETERS_EXAMPLE,
    CacheControl,
    SkippedTool,
    problems_of_names,
    tool_of,
)

_MAX_MESSAGES = 4096
# Claude Code's default, which keeps what this server keeps anyway.
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class ClientTool(Body):
    """A function that the client runs."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "defer_loading": (None, False),
    }

    name: ToolName
    """The name of the tool."""
    input_schema: dict[str, Any] = Field(examples=[PARAMETERS_EXAMPLE])
    """A JSON schema of an object, which the tool's input satisfies."""
    type: Literal["custom"] | None = None
    """The type of the tool."""
    description: str | None = Field(None, max_length=65_536, examples=["The weather of a city."])
    """The purpose of the tool, for the model."""
    strict: bool | None = None
    """With true, a keyword that cannot be kept is refused. With false, the input may be any object.
    Default: it satisfies the schema as far as a grammar keeps it (docs/guide/tools.md)."""
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None
    """A hint without effect."""
    input_examples: list[dict[str, Any]] | None = Field(None, examples=[[{"city": "Rome"}]])
    """A hint without effect."""
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None

    def tool(self, index: int) -> Tool:
        given = (self.name, self.description, self.input_schema, self.strict)
        return tool_of(*given, f"tools.{index}.input_schema")


class ServerTool(SkippedTool):
    """A tool that Anthropic's servers run."""

    type: str = Field(
        max_length=64,
        json_schema_extra={"not": {"const": "custom"}},
        examples=["web_search_20250305"],
    )
    """The type. Such tools are skipped, and the answer names their types in `skipped_tools`."""


def _kind_of_tool(value: Any) -> str:
    if isinstance(value, dict):
        return "a-client-tool" if value.get("type") in (None, "custom") else "another-type"
    return "another-type" if isinstance(value, ServerTool) else "a-client-tool"


ToolField = Annotated[
    Annotated[ClientTool, Tag("a-client-tool")] | Annotated[ServerTool, Tag("another-type")],
    Discriminator(_kind_of_tool),
]


class MessagesToolChoice(Body):
    """Anthropic's `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto` allows text and calls, `any` calls only, `tool` one call of `name`, and `none` no
    calls."""
    name: ToolName | None = Field(None, examples=["get_weather"])
    """The name of one of `tools`, for the type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """With true, an answer has one call at most. Default: false."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if (self.name is not None) != (self.type == "tool"):
            told = "is missing" if self.name is None else "is given"
            yield "name", f"{told}: `type` is {self.type}"


class Thinking(Body):
    """Anthropic's `thinking`, which turns reasoning on or off. The budget is a hint."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """`disabled` is the effort `none` (docs/guide/tools.md#reasoning). Others are the effort of
    `output_config`, or `medium`."""
    budget_tokens: int | None = Field(None, ge=1, le=INT64, examples=[1024])
    """A hint without effect."""
    display: Literal["summarized", "omitted"] | None = None
    """A hint without effect."""


class JsonFormat(Body):
    """A schema that the text has to satisfy."""

    type: Literal["json_schema"]
    """The type of the format."""
    schema_: dict[str, Any] = Field(alias="schema", examples=[SCHEMA_EXAMPLE])
    """The JSON schema that the text satisfies (docs/reference/api.md#structured-answers). At most
    65536 bytes."""


class OutputConfig(Body):
    """Anthropic's `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template, if it reads one (docs/guide/tools.md#reasoning)."""
    format: JsonFormat | None = None
    """A schema that the text satisfies. Default: any text."""


class CountTokensRequest(ModelField, TemplateFields):
    """POST /v1/messages/count_tokens: the fields that are written into the prompt."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "speed": (None, "standard"),
        "context_management": (None, {"edits": []}, _KEEP_ALL),
    }

    messages: Annotated[
        list[BlockMessage],
        Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True),
        FirstMistakes,
    ]
    """The conversation. If the last message is the assistant's and has no call, then the answer
    goes on from it."""
    system: str | TextBlocks | None = Field(None, examples=["Answer in one sentence."])
    """A system message, as a text or as blocks of text."""
    tools: (
        Annotated[list[ToolField], Field(max_length=MAX_TOOLS, fail_fast=True), FirstMistakes]
        | None
    ) = None
    """Tools that the model may call (docs/guide/tools.md). Tools with another `type` than `custom`
    are skipped. The answer names their types in `skipped_tools`."""
    tool_choice: MessagesToolChoice | None = None
    """Whether the answer is text, calls, or either. Default: `auto`."""
    thinking: Thinking | None = None
    """Whether the model reasons. Default: the template's own."""
    output_config: OutputConfig | None = None
    """The effort of the reasoning, and the format of the text."""
    cache_control: CacheControl = None
    speed: str | None = None
    context_management: dict[str, Any] | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a field and its problem for each conflict."""
        names = [tool.name for tool in self.functions]
        choice = self.tool_choice
        chosen = [] if choice is None or choice.name is None else [choice.name]
        yield from problems_of_names(names, chosen)
        if choice is not None and choice.type == "any" and not names:
            yield "tool_choice", "of any needs `tools` that the client runs"
        yield from problems_of_results(self.messages)

    @property
    def functions(self) -> list[ClientTool]:
        return [tool for tool in self.tools or () if isinstance(tool, ClientTool)]

    @property
    def skipped(self) -> list[str]:
        others = [tool.type for tool in self.tools or () if isinstance(tool, ServerTool)]
        return list(dict.fromkeys(others))

    @property
    def effort(self) -> str | None:
        """Return OpenAI's effort for it; None: the chat template's own."""
        asked = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return asked
        return "none" if self.thinking.type == "disabled" else asked or "medium"

    @property
    def continues(self) -> bool:
        """Return whether the answer goes on from a last message of the assistant."""
        last = self.messages[-1]
        is_call = any(isinstance(block, ToolUseBlock) for block in last.blocks)
        return last.role == "assistant" and not is_call

    @property
    def schema_asked(self) -> Mapping[str, Any] | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        return self.output_config.format.schema_


class Metadata(Body):
    """A hint."""

    user_id: str | None = Field(None, max_length=2048, examples=["user-1"])
    """A hint without effect."""


class MessagesRequest(CountTokensRequest, RequestFields):
    """POST /v1/messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountTokensRequest.neutral,
        "service_tier": (None, "auto", "standard_only"),
    }

    max_tokens: int = Field(ge=1, le=INT64, examples=[100])
    """The limit of reasoning, text and calls together. If the context has less room, then the
    answer ends there, with `model_context_window_exceeded`."""
    stop_sequences: (
        Annotated[
            list[StopString],
            Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = Field(None, examples=[["\n\n"]])
    """The text ends before the string. At most 64 of at most 256 characters each."""
    top_k: int | None = Field(None, **SAMPLING_LIMITS["top_k"].bounds, examples=[40])
    """Keeps this many of the most likely tokens. 0 and -1 turn it off. Default: that of the model's
    `generation_config`, or off."""
    metadata: Metadata | None = None
    """A hint without effect."""
    service_tier: str | None = None


class TokenCount(Body):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int = Field(examples=[80])
    """Tokens of the prompt."""


class ThinkingTokens(Body):
    """The parts of the answer."""

    thinking_tokens: int = Field(examples=[0])
    """Tokens of the reasoning."""


class MessageUsage(Body):
    """Token counts."""

    input_tokens: int = Field(examples=[16])
    """Tokens of the prompt that were not found in the prefix cache."""
    cache_read_input_tokens: int = Field(examples=[64])
    """Tokens of the prompt that were found in the prefix cache."""
    cache_creation_input_tokens: Literal[0] = 0
    """Always 0, because the server does not count them."""
    output_tokens: int = Field(examples=[160])
    """Generated tokens, end tokens included."""
    output_tokens_details: ThinkingTokens
    """Parts of the answer."""


class MessageBody(Body):
    """The answer of /v1/messages. Blocks are objects of Anthropic's shapes."""

    id: str = Field(examples=["msg_4f2a90c1d3b74f2a90c1d3b74f2a90c1"])
    """The id of the answer."""
    type: Literal["message"] = "message"
    """The kind of the object."""
    role: Literal["assistant"] = "assistant"
    """The model."""
    model: str = Field(examples=["ropewalk-demo"])
    """The served name."""
    content: list[dict[str, Any]] = Field(examples=[[{"type": "text", "text": "A rope."}]])
    """The blocks `thinking` (with an empty `signature`), `text` and `tool_use`. The `input` of a
    call that `max_tokens` cuts has the values that are whole."""
    stop_reason: str | None = Field(None, examples=["end_turn"])
    """`end_turn`, `max_tokens`, `stop_sequence`, `tool_use` or `model_context_window_exceeded`, or
    null while the answer goes on."""
    stop_sequence: str | None = Field(None, examples=[None])
    """The stop string that ended the answer, or null."""
    usage: MessageUsage
    """The counts of tokens."""
    skipped_tools: list[str] | None = Field(
        None, exclude_if=is_none, examples=[["web_search_20250305"]]
    )
    """Types of the request's tools that are not served. Absent if there are none."""
    rope: RopeAnswer | None = Field(None, exclude_if=is_none)
    """The scaling that was applied, at the end."""
