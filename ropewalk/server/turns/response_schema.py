"""The body of POST /v1/responses."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ropewalk.model_runtime.text.grammar import ANY_OBJECT
from ropewalk.model_runtime.text.tools.tool_format import Tool
from ropewalk.server.api.parts.request_fields import HintFields, MetadataKey, RequestFields
from ropewalk.server.api.rope_schema import INT64
from ropewalk.server.api.strict_body import Body, Few, FirstMistakes, other_kind
from ropewalk.server.api.structured_schema import SCHEMA_EXAMPLE
from ropewalk.server.turns.chat_schema import ReasoningEffort, TemplateFields
from ropewalk.server.turns.item_schema import Input, problems_of_results
from ropewalk.server.turns.tool_schema import (
    MAX_TOOLS,
    PARAMETERS_EXAMPLE,
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
    """The type of the tool."""
    name: FunctionName
    """The name of the function."""
    description: str | None = Field(None, max_length=16_384, examples=["The weather of a city."])
    """The purpose of the function, for the model."""
    parameters: dict[str, Any] | None = Field(None, examples=[PARAMETERS_EXAMPLE])
    """A JSON schema of an object. Default: the function takes no arguments."""
    strict: bool | None = None
    """With true, a keyword that cannot be kept is refused. With false, the arguments may be any
    object. Default: they satisfy the schema as far as a grammar keeps it (docs/guide/tools.md)."""
    output_schema: dict[str, Any] | None = Field(None, examples=[{"type": "string"}])
    """A hint without effect."""
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None

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


class ResponsesNamedFunction(Body):
    """A function that a choice names."""

    type: Literal["function"]
    """The type of the tool."""
    name: FunctionName
    """The name of one of `tools`."""


class ResponsesToolChoice(Body):
    """A `tool_choice` that is an object."""

    type: Literal["function", "allowed_tools"]
    """Whether one function is named, or some of the tools are."""
    name: FunctionName | None = Field(None, examples=["get_weather"])
    """The function of the type `function`; the answer is one call of it."""
    mode: Literal["auto", "required"] | None = None
    """The mode of the type `allowed_tools`: `auto` allows text, too, and `required` calls only."""
    tools: (
        Annotated[
            list[ResponsesNamedFunction], Field(min_length=1, max_length=MAX_TOOLS), FirstMistakes
        ]
        | None
    ) = None
    """The tools of the type `allowed_tools`: the prompt has all, and calls are limited to these."""

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
    Annotated[ChoiceMode, Tag("a-word")] | Annotated[ResponsesToolChoice, Tag("an-object")],
    Discriminator(
        lambda value: "an-object" if isinstance(value, dict | ResponsesToolChoice) else "a-word"
    ),
]


class TextFormat(Body):
    """The format of the answer's text; every schema is strict here."""

    type: Literal["text", "json_object", "json_schema"]
    """`text` is any text, `json_object` any JSON object, and `json_schema` JSON that satisfies
    `schema`."""
    name: str | None = Field(None, min_length=1, max_length=64, examples=["answer"])
    """A name without effect."""
    schema_: dict[str, Any] | None = Field(None, alias="schema", examples=[SCHEMA_EXAMPLE])
    """The JSON schema that the text satisfies (docs/reference/api.md#structured-answers). At most
    65536 bytes."""
    strict: bool | None = None
    """Without effect: every schema is strict."""
    description: str | None = Field(None, max_length=4096, examples=["A colour."])
    """A description without effect."""

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
    """The format of the text. Default: any text."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint without effect."""


class ReasoningConfig(Body):
    """OpenAI's `reasoning`. All but the effort are hints: an answer has its whole reasoning."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mode": (None, "standard")}

    effort: ReasoningEffort | None = None
    """A variable of the chat template, if it reads one (docs/guide/tools.md#reasoning)."""
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    """A hint without effect."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """A hint without effect."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """A hint without effect."""
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


class ResponsesRequest(HintFields, TemplateFields, RequestFields):
    """POST /v1/responses."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "service_tier": (None, "auto", "default"),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    input: Input = Field(examples=["Tell me a story."])
    """A text, or items: messages, `function_call`, `function_call_output` and `reasoning`. The
    whole conversation is sent with each request."""
    instructions: str | None = Field(None, examples=["Answer in one sentence."])
    """A system message before the input. System messages at the start of the input are joined to
    it."""
    tools: (
        Annotated[list[ToolItem], Field(max_length=MAX_TOOLS, fail_fast=True), FirstMistakes] | None
    ) = None
    """Functions that the model may call (docs/guide/tools.md). Tools of other types are skipped.
    The answer names their types in `skipped_tools`."""
    tool_choice: ToolChoiceField | None = Field(None, examples=["auto"])
    """Whether the answer is text, calls, or either (docs/guide/tools.md#requests). Default:
    `auto`."""
    parallel_tool_calls: bool | None = None
    """With false, an answer has one call at most. Otherwise it has at most 8.
    Default: true."""
    max_output_tokens: int | None = Field(None, ge=1, le=INT64, examples=[100])
    """The limit of reasoning, text and calls together. Default: up to the longest context
    (docs/reference/rope.md)."""
    text: TextConfig | None = None
    """The format of the answer's text. Default: any text."""
    reasoning: ReasoningConfig | None = None
    """The effort of the reasoning."""
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    """A hint without effect. It has no logprobs."""
    store: bool | None = None
    """A hint without effect. Nothing is stored, and the answer says `"store": false`."""
    client_metadata: Annotated[dict[MetadataKey, str], Few(64)] | None = Field(
        None, examples=[{"run": "7"}]
    )
    """A hint without effect."""
    max_tool_calls: int | None = Field(None, ge=1, le=INT64, examples=[8])
    """A hint without effect: it bounds the calls of built-in tools."""
    stream_options: ObfuscationOptions | None = None
    """Accepted without effect. Needs `stream`."""
    top_logprobs: int | None = None
    truncation: str | None = None
    service_tier: str | None = None
    previous_response_id: str | None = Field(None, examples=[None])
    """Refused, because the server stores no answers. Send the whole conversation in `input`."""
    conversation: Any = Field(None, examples=[None])
    """Refused, because the server stores no answers. Send the whole conversation in `input`."""
    background: bool | None = Field(None, examples=[False])
    """True is refused, because the server stores no answers. Use `stream`."""

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
        chosen = sorted(choice.names) if isinstance(choice, ResponsesToolChoice) else ()
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
