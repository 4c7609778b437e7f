"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ropewalk.model_runtime.text.tools.tool_format import Tool
from ropewalk.server.api.generation_schema import StopString, TimeLimit
from ropewalk.server.api.rope_schema import INT64, RopeAnswer, RopeField
from ropewalk.server.api.strict_body import Body, FirstMistakes, is_none
from ropewalk.server.settings.request_sections import largest
from ropewalk.server.turns.block_schema import (
    Message,
    TextBlocks,
    ToolName,
    ToolUseBlock,
    problems_of_results,
)
from ropewalk.server.turns.chat_schema import TemplateVariables
from ropewalk.server.turns.tool_schema import (
    MAX_TOOLS,
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
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = Field(None, max_length=65_536)
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None  # a hint
    input_examples: list[dict[str, Any]] | None = None  # a hint
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None

    def tool(self, index: int) -> Tool:
        given = (self.name, self.description, self.input_schema, self.strict)
        return tool_of(*given, f"tools.{index}.input_schema")


class ServerTool(SkippedTool):
    """A tool that Anthropic's servers run."""

    type: str = Field(max_length=64, json_schema_extra={"not": {"const": "custom"}})


def _kind_of_tool(value: Any) -> str:
    if isinstance(value, dict):
        return "a-client-tool" if value.get("type") in (None, "custom") else "another-type"
    return "another-type" if isinstance(value, ServerTool) else "a-client-tool"


ToolField = Annotated[
    Annotated[ClientTool, Tag("a-client-tool")] | Annotated[ServerTool, Tag("another-type")],
    Discriminator(_kind_of_tool),
]


class ToolChoice(Body):
    """Anthropic's `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if (self.name is not None) != (self.type == "tool"):
            told = "is missing" if self.name is None else "is given"
            yield "name", f"{told}: `type` is {self.type}"


class Thinking(Body):
    """Anthropic's `thinking`, which turns reasoning on or off. The budget is a hint."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=INT64)
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Body):
    """A schema that the text has to satisfy."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Anthropic's `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens: the fields that are written into the prompt."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "speed": (None, "standard"),
        "context_management": (None, {"edits": []}, _KEEP_ALL),
    }

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True), FirstMistakes
    ]
    model: str | None = Field(None, max_length=256)
    system: str | TextBlocks | None = None
    tools: (
        Annotated[list[ToolField], Field(max_length=MAX_TOOLS, fail_fast=True), FirstMistakes]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    speed: str | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: TemplateVariables | None = None  # our own

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

    user_id: str | None = Field(None, max_length=2048)


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountTokensRequest.neutral,
        "service_tier": (None, "auto", "standard_only"),
    }

    max_tokens: int = Field(ge=1, le=INT64)
    stop_sequences: (
        Annotated[
            list[StopString],
            Field(max_length=largest("max_stop_strings"), fail_fast=True),
            FirstMistakes,
        ]
        | None
    ) = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT64)
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    # Our own.
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    cache_salt: str | None = Field(None, max_length=128)
    max_time: TimeLimit = None
    rope: RopeField | None = None


class TokenCount(Body):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class ThinkingTokens(Body):
    """The parts of the answer."""

    thinking_tokens: int


class MessageUsage(Body):
    """Token counts."""

    input_tokens: int  # not read from the prefix cache
    cache_read_input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0  # not counted
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageBody(Body):
    """The answer of /v1/messages. Blocks are objects of Anthropic's shapes."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    skipped_tools: list[str] | None = Field(None, exclude_if=is_none)  # types of tools not served
    rope: RopeAnswer | None = Field(None, exclude_if=is_none)  # at the end
