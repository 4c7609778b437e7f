"""Bodies of POST /v1/responses."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ropewalk.model_runtime.text.grammar import ANY_OBJECT
from ropewalk.model_runtime.text.tools.tool_format import Tool
from ropewalk.server.api.generation_schema import (
    MetadataKey,
    MetadataValue,
    PromptCacheOptions,
    TimeLimit,
)
from ropewalk.server.api.rope_schema import INT64, RopeAnswer, RopeField
from ropewalk.server.api.strict_body import Body, FirstMistakes, few, is_none, other_kind
from ropewalk.server.turns.chat_schema import ReasoningEffort, TemplateVariables
from ropewalk.server.turns.item_schema import Input, problems_of_results
from ropewalk.server.turns.tool_schema import (
    MAX_TOOLS,
    ChoiceMode,
    FunctionName,
    SkippedTool,
    problems_of_names,
    tool_of,
)

_STATELESS = "is not served: the server stores no answers. Send the whole conversation in `input`"


class FunctionTool(Body):
    """A function that the model may call."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "defer_loading": (None, False),
    }

    type: Literal["function"]
    name: FunctionName
    description: str | None = Field(None, max_length=16_384)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None  # a hint

    def tool(self, index: int) -> Tool:
        given = (self.name, self.description, self.parameters, self.strict)
        return tool_of(*given, f"tools.{index}.parameters")


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type", "function") if isinstance(value, dict) else value
    return "a-function" if kind == "function" or isinstance(value, FunctionTool) else "another-type"


ToolItem = Annotated[
    Annotated[FunctionTool, Tag("a-function")] | Annotated[SkippedTool, Tag("another-type")],
    Discriminator(_kind_of_tool),
]


class NamedFunction(Body):
    """A function that a choice names."""

    type: Literal["function"]
    name: FunctionName


class ToolChoice(Body):
    """A `tool_choice` that is an object."""

    type: Literal["function", "allowed_tools"]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: (
        Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS), FirstMistakes]
        | None
    ) = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in ("function", "allowed_tools"):
            raise other_kind("type", "must be function or allowed_tools")
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that the type asks for, or that only the other has."""
        for name, kind in (("name", "function"), ("mode", "allowed_tools")):
            given = getattr(self, name) is not None
            if given != (self.type == kind):
                yield name, f"is {'given' if given else 'missing'}: `type` is {self.type}"
        if (self.tools is not None) != (self.type == "allowed_tools"):
            told = "is missing" if self.tools is None else "is given"
            yield "tools", f"{told}: `type` is {self.type}"

    @property
    def names(self) -> frozenset[str]:
        named = [] if self.name is None else [self.name]
        return frozenset([*named, *(each.name for each in self.tools or ())])


ToolChoiceField = Annotated[
    Annotated[ChoiceMode, Tag("a-word")] | Annotated[ToolChoice, Tag("an-object")],
    Discriminator(lambda value: "an-object" if isinstance(value, dict | ToolChoice) else "a-word"),
]


class TextFormat(Body):
    """The format of the answer's text; every schema is strict here."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = Field(None, max_length=4096)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            told = "is missing" if self.schema_ is None else "is given"
            yield "schema", f"{told}: `type` is {self.type}"

    @property
    def schema_asked(self) -> Mapping[str, Any] | None:
        return ANY_OBJECT if self.type == "json_object" else self.schema_


class TextConfig(Body):
    """OpenAI's `text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint that agents send unasked


class ReasoningConfig(Body):
    """OpenAI's `reasoning`. All but the effort are hints: an answer has its whole reasoning."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mode": (None, "standard")}

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class ObfuscationOptions(Body):
    """OpenAI's `stream_options` of this route."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}

    include_obfuscation: bool | None = None


# Additions to an answer: those of built-in tools, which no answer has, and reasoning, which is
# never encrypted.
Include = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(Body):
    """POST /v1/responses."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "service_tier": (None, "auto", "default"),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    input: Input
    model: str | None = Field(None, max_length=256)
    instructions: str | None = None
    tools: (
        Annotated[list[ToolItem], Field(max_length=MAX_TOOLS, fail_fast=True), FirstMistakes] | None
    ) = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: ObfuscationOptions | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    service_tier: str | None = None
    # Hints of OpenAI's clients, which change nothing here.
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    store: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], few(16)] | None = None
    client_metadata: Annotated[dict[MetadataKey, str], few(64)] | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=INT64)  # of built-in tools
    user: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = Field(None, max_length=512)
    # Refused, with the reason.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    # Our own.
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    cache_salt: str | None = Field(None, max_length=128)
    max_time: TimeLimit = None
    chat_template_kwargs: TemplateVariables | None = None
    rope: RopeField | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a field and its problem for each conflict."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                yield name, _STATELESS
        if self.background:
            yield "background", "is not served: the server stores no answers. Use `stream`"
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "needs `stream`: true"
        names = [tool.name for tool in self.functions]
        choice = self.tool_choice
        chosen = sorted(choice.names) if isinstance(choice, ToolChoice) else ()
        yield from problems_of_names(names, chosen)
        if choice == "required" and not names:
            yield "tool_choice", "of required needs `tools` of type function"
        if not isinstance(self.input, str):
            yield from problems_of_results(self.input)

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def skipped(self) -> list[str]:
        others = [tool.type for tool in self.tools or () if isinstance(tool, SkippedTool)]
        return list(dict.fromkeys(others))

    @property
    def schema_asked(self) -> Mapping[str, Any] | None:
        if self.text is None or self.text.format is None:
            return None
        return self.text.format.schema_asked


class InputTokensDetails(Body):
    """The source of the input's keys and values."""

    cached_tokens: int  # read from the prefix cache
    cache_write_tokens: int = 0  # not counted


class OutputTokensDetails(Body):
    """The parts of the answer."""

    reasoning_tokens: int


class ResponseUsage(Body):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseBody(Body):
    """The answer of /v1/responses. Items are objects of OpenAI's shapes."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    background: Literal[False] = False
    store: Literal[False] = False
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    skipped_tools: list[str] | None = Field(None, exclude_if=is_none)  # types of tools not served
    top_logprobs: Literal[0] = 0
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["default"] = "default"
    metadata: dict[str, str]
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    usage: ResponseUsage | None = None
    rope: RopeAnswer | None = None  # at the end
