"""The fields about tools: what may be called, the choice, and calls that are sent back."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ropewalk.model_runtime.text.tools.tool_format import Tool
from ropewalk.server.api.strict_body import (
    MAX_DEPTH,
    Body,
    FirstMistakes,
    given,
    is_too_deep,
    only_type,
    other_kind,
)
from ropewalk.server.strict_json import TwiceError, object_of

ChoiceMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class CallChoice:
    """A client's `tool_choice`, in whichever words its API has for it."""

    mode: ChoiceMode = "auto"
    names: frozenset[str] | None = None  # of the functions that may be called; None: all
    is_named: bool = False  # the client has named the one function to call

    @classmethod
    def of_one(cls, name: str) -> Self:
        return cls("required", frozenset([name]), is_named=True)


# Clients of Anthropic's models send it to every server.
CacheControl = Annotated[
    dict[str, Any] | None,
    Field(
        description="Accepted without effect: every prefix is cached.",
        examples=[{"type": "ephemeral"}],
    ),
]
MAX_TOOLS = 128  # OpenAI's limit
PARAMETERS_EXAMPLE = {"type": "object", "properties": {"city": {"type": "string"}}}
FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$", examples=["get_weather"])]


def tool_of(
    name: str,
    description: str | None,
    parameters: Mapping[str, Any] | None,
    strict: bool | None,  # noqa: FBT001  # the client's field
    field: str,
) -> Tool:
    """Return a tool in the runtime's format; `field` is that of its parameters."""
    is_strict, is_exact = strict is not False, strict is True
    return Tool(name, description, parameters, is_strict=is_strict, is_exact=is_exact, field=field)


def _function_only(value: Any) -> Any:
    return only_type(value, "function", "custom and built-in tools")


class FunctionField(Body):
    """OpenAI's `function` of a tool."""

    name: FunctionName
    """The name of the function."""
    description: str | None = Field(None, max_length=16_384, examples=["The weather of a city."])
    """The purpose of the function, for the model."""
    parameters: dict[str, Any] | None = Field(None, examples=[PARAMETERS_EXAMPLE])
    """A JSON schema of an object. Default: the function takes no arguments."""
    strict: bool | None = None
    """With true, a keyword that cannot be kept is refused. With false, the arguments may be any
    object. Default: they satisfy the schema as far as a grammar keeps it (docs/guide/tools.md)."""
    cache_control: CacheControl = None


class ToolField(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    """The type of the tool."""
    function: FunctionField
    """The function."""
    cache_control: CacheControl = None

    _refuse_other_types = model_validator(mode="before")(_function_only)

    def tool(self, index: int) -> Tool:
        function, field = self.function, f"tools.{index}.function.parameters"
        given = (function.name, function.description, function.parameters, function.strict)
        return tool_of(*given, field)


class NamedFunction(Body):
    """The function that a choice names."""

    name: FunctionName
    """The name of one of `tools`."""


class NamedTool(Body):
    """A tool that a choice names."""

    type: Literal["function"]
    """The type of the tool."""
    function: NamedFunction
    """The function."""

    _refuse_other_types = model_validator(mode="before")(_function_only)


class AllowedTools(Body):
    """OpenAI's `allowed_tools`: some of the tools, so that the prompt stays the same."""

    mode: Literal["auto", "required"]
    """`auto` allows text, too, and `required` calls only."""
    tools: Annotated[
        list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), FirstMistakes
    ]
    """The tools that may be called."""


class ToolChoice(Body):
    """A `tool_choice` that is an object."""

    type: Literal["function", "allowed_tools"]
    """Whether one function is named, or some of the tools are."""
    function: NamedFunction | None = None
    """The function of the type `function`; the answer is one call of it."""
    allowed_tools: AllowedTools | None = None
    """The tools of the type `allowed_tools`: the prompt has all, and calls are limited to these."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_custom(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "custom":
            told = "must be function or allowed_tools; custom is not supported"
            raise other_kind("type", told + given("custom"))
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the object that the type asks for if it is missing, or the other if it is there."""
        for name in ("function", "allowed_tools"):
            is_given = getattr(self, name) is not None
            if is_given != (self.type == name):
                yield name, f"is {'given' if is_given else 'missing'}: `type` is {self.type}"


def _kind_of_choice(value: Any) -> str:
    return "an-object" if isinstance(value, dict | ToolChoice) else "a-word"


# Errors of one kind only are reported; their tags are left out of field names.
ToolChoiceField = Annotated[
    Annotated[ChoiceMode, Tag("a-word")] | Annotated[ToolChoice, Tag("an-object")],
    Discriminator(_kind_of_choice),
]


class _NotANumberError(ValueError):
    """NaN or an infinity, which JSON has not."""


def _not_a_number(word: str) -> Any:
    raise _NotANumberError(word)


_ARGUMENTS = json.JSONDecoder(object_pairs_hook=object_of, parse_constant=_not_a_number)


def arguments_of(text: str) -> str:
    """Return the JSON of an earlier call's arguments; clients write no argument as no text."""
    return text if text.strip() else "{}"


def problem_of_arguments(field: str, arguments: str) -> Iterator[tuple[str, str]]:
    """Yield the field of a call's arguments if they are no JSON object, or too deep a one."""
    told = ""
    try:
        decoded = _ARGUMENTS.decode(arguments_of(arguments))
        # The stack that is left where they are decoded again may have less of the stack left.
        if isinstance(decoded, dict) and not is_too_deep(decoded):
            return
        if isinstance(decoded, dict):
            told = f", nested at most {MAX_DEPTH} deep"
    except TwiceError as error:
        yield field, f"must have each name once. Given twice: {json.dumps(error.name[:64])}"
        return
    except ValueError as error:
        # json's own error is of its syntax; the other one is Python's limit of digits.
        if not isinstance(error, json.JSONDecodeError | _NotANumberError):
            told = ", with numbers of at most 4300 digits"
    except RecursionError:
        told = f", nested at most {MAX_DEPTH} deep"
    yield field, f"must be a JSON object as text{told}" + given(arguments)


def call_for_template(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as a mapping, as chat templates expect them."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


class CalledFunction(Body):
    """The function of a call that is sent back."""

    name: FunctionName
    """The name of the function."""
    arguments: str = Field(examples=['{"city": "Rome"}'])
    """A JSON object as text, with each name once, without NaN, and nested at most 64 deep. No text,
    or whitespace, is an empty object."""


class CallField(Body):
    """A call of an assistant's message."""

    id: str = Field(min_length=1, max_length=256, examples=["aB3dE5fG7"])
    """The id, which its result names."""
    type: Literal["function"] | None = "function"
    """The type of the tool."""
    function: CalledFunction
    """The function and its arguments."""
    index: int | None = Field(None, ge=0, examples=[0])
    """Accepted without effect, because some clients send back the pieces of a stream."""

    _refuse_other_types = model_validator(mode="before")(_function_only)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from problem_of_arguments("function.arguments", self.function.arguments)

    def for_template(self) -> dict[str, Any]:
        arguments = json.loads(arguments_of(self.function.arguments))
        return call_for_template(self.id, self.function.name, arguments)


def named_tools(choice: ToolChoice) -> list[str]:
    if choice.allowed_tools is not None:
        return [each.function.name for each in choice.allowed_tools.tools]
    return [] if choice.function is None else [choice.function.name]


def call_choice(choice: ChoiceMode | ToolChoice | None) -> CallChoice:
    """Return the choice of a turn for a `tool_choice`."""
    if not isinstance(choice, ToolChoice):
        return CallChoice(choice or "auto")
    if choice.allowed_tools is not None:
        return CallChoice(choice.allowed_tools.mode, frozenset(named_tools(choice)))
    return CallChoice.of_one(*named_tools(choice))


def problems_of_names(names: Sequence[str], chosen: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a name that two tools have, and the first chosen name that no tool has."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        yield "tools", f"must have each name once. Given twice: {twice!a}"
    for name in chosen:
        if name not in names:
            yield "tool_choice", f"names a function that `tools` has not: {name!a}"
            return


def problems_of_choice(
    tools: Sequence[ToolField], choice: ChoiceMode | ToolChoice | None
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with tools and a choice together."""
    chosen = named_tools(choice) if isinstance(choice, ToolChoice) else ()
    yield from problems_of_names([tool.function.name for tool in tools], chosen)
    if choice == "required" and not tools:
        yield "tool_choice", "of required needs `tools`"


class SkippedTool(BaseModel):
    """A tool of a type that is not served. Agents offer such tools by default."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, use_attribute_docstrings=True
    )

    type: str = Field(
        max_length=64, json_schema_extra={"not": {"const": "function"}}, examples=["web_search"]
    )
    """The type. Such tools are skipped, and the answer names their types in `skipped_tools`."""
