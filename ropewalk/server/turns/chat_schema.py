"""Bodies of POST /v1/chat/completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, model_validator

from ropewalk.model_runtime.request import MAX_LOGPROBS
from ropewalk.server.api.generation_schema import (
    NEUTRAL,
    GenerationRequest,
)
from ropewalk.server.api.rope_schema import INT64
from ropewalk.server.api.strict_body import (
    Body,
    Few,
    FirstMistakes,
    given,
    only_type,
    other_kind,
)
from ropewalk.server.turns.tool_schema import (
    MAX_TOOLS,
    CacheControl,
    CallField,
    ToolChoiceField,
    ToolField,
    problems_of_choice,
)

Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # OpenAI's

_MAX_MESSAGES = 4096
_MAX_DOCUMENTS = 1024


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    """The type of the part."""
    text: str = Field(examples=["Tell me a story."])
    """The text."""
    cache_control: CacheControl = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_parts(cls, value: Any) -> Any:
        return only_type(value, "text", "images, sound and files")


class Prediction(Body):
    """OpenAI's `prediction`: text that the answer probably contains. It changes the speed only."""

    type: Literal["content"]
    """The type of the prediction."""
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), FirstMistakes] = (
        Field(examples=["There was a rope."])
    )
    """The text, or parts of it. It may have as many characters as a prompt."""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Message(Body):
    """One turn."""

    # Which fields a role needs cannot be said by a schema's list of required fields.
    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "user", "content": "text"}]})

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "refusal": (None,),
        "annotations": (None, []),
        "audio": (None,),
        "function_call": (None,),
    }

    role: Role
    """The speaker. `developer` is the same as `system`."""
    content: (
        str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), FirstMistakes] | None
    ) = Field(None, examples=["Tell me a story."])
    """The text, or parts of it, which the server joins with line breaks. An assistant's message
    with calls or reasoning may have null."""
    name: str | None = Field(None, max_length=256, examples=["anna"])
    """A name, which has no effect unless the chat template reads it."""
    tool_calls: Annotated[list[CallField], Field(max_length=MAX_TOOLS), FirstMistakes] | None = None
    """The calls of an assistant's earlier answer. `arguments` must be a JSON object as text,
    with each name once, without NaN, and nested at most 64 deep. An empty text, or one of
    whitespace, is an empty object."""
    tool_call_id: str | None = Field(None, min_length=1, max_length=256, examples=["aB3dE5fG7"])
    """The call whose result this is, for the role `tool`."""
    reasoning_content: str | None = Field(None, examples=["They ask for a story."])
    """The reasoning of an assistant's earlier answer."""
    reasoning: str | None = Field(None, examples=["They ask for a story."])
    """The same as `reasoning_content`. Two different texts get 400."""
    cache_control: CacheControl = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_roles(cls, value: Any) -> Any:
        """Refuse other roles before a field that only they have is unknown."""
        roles = get_args(Role)
        if isinstance(value, dict) and "role" in value and value["role"] not in roles:
            told = f"must be one of {', '.join(roles)}"
            raise other_kind("role", told + given(value["role"]))
        return value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield fields that this role has not, or lacks."""
        if self.content is None and not (self.role == "assistant" and self._says_something):
            is_given = "content" in self.model_fields_set
            told = "must be a string or a list of text parts. Given: null"
            yield "content", told if is_given else "is missing"
        two = self.reasoning_content, self.reasoning
        if all(two) and two[0] != two[1]:
            yield "reasoning", "differs from `reasoning_content`, give one"
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning"):
                if getattr(self, name):
                    yield name, "needs the role assistant"
        if (self.tool_call_id is not None) != (self.role == "tool"):
            is_tool = self.role == "tool"
            yield "tool_call_id", "is missing" if is_tool else "needs the role tool"

    @property
    def _says_something(self) -> bool:
        return bool(self.tool_calls or self.reasoning_content or self.reasoning)

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Return the message for a template; `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        return message


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True), FirstMistakes
]
Tools = Annotated[list[ToolField], Field(max_length=MAX_TOOLS, fail_fast=True), FirstMistakes]
Documents = Annotated[
    list[dict[str, Any]], Field(max_length=_MAX_DOCUMENTS, fail_fast=True), FirstMistakes
]


def problems_of_results(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield the first result without a call of its own before it, or the first id of two calls."""
    open_ids: set[str] = set()  # of calls without a result
    answered: set[str] = set()
    for index, message in enumerate(messages):
        for at, call in enumerate(message.tool_calls or ()):
            if call.id in open_ids:
                told = "must not be that of an earlier call without a result"
                yield f"messages.{index}.tool_calls.{at}.id", told + given(call.id)
                return
            open_ids.add(call.id)
        asked = message.tool_call_id
        if asked is not None and asked not in open_ids:
            told = "must name a call of a message before it"
            if asked in answered:
                told = "names a call that has a result already"
            yield f"messages.{index}.tool_call_id", told + given(asked)
            return
        if asked is not None:
            open_ids.remove(asked)
            answered.add(asked)


def problems_of_opening(
    messages: Sequence[Message], *, opens: bool | None, continues: bool | None
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the end of a prompt that continues the last message."""
    if continues and messages[-1].role != "assistant":
        yield "continue_final_message", "needs a last message of the assistant"
    if continues and opens:
        yield "add_generation_prompt", "cannot be true together with `continue_final_message`"
    if continues and messages[-1].tool_calls:
        yield "continue_final_message", "needs a last message without `tool_calls`"


class TemplateFields(Body):
    """The field of every body that a chat template renders."""

    chat_template_kwargs: Annotated[dict[str, bool | int | float | str | None], Few(16)] | None = (
        Field(None, examples=[{"enable_thinking": False}])
    )
    """Variables of the chat template. The operator must allow them
    (`allowed_chat_template_kwargs`), and the template must read them. Other variables get 400.
    Null, and false for `enable_thinking` or `thinking`, pass if the template does not read the
    variable."""


class TurnFields(TemplateFields):
    """The fields beside `messages` that change the prompt of a chat."""

    tools: Tools | None = None
    """Functions that the model may call (docs/guide/tools.md)."""
    tool_choice: ToolChoiceField | None = Field(None, examples=["auto"])
    """Whether the answer is text, calls, or either (docs/guide/tools.md#requests). Default:
    `auto`."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the chat template, if it reads one (docs/guide/tools.md#reasoning)."""
    add_generation_prompt: bool | None = None
    """The prompt ends with the header of the assistant's turn (vLLM's field). Default: true."""
    continue_final_message: bool | None = None
    """The prompt ends inside the last message, which must be the assistant's (vLLM's field).
    Default: false."""
    documents: Documents | None = Field(
        None, examples=[[{"title": "Opening hours", "text": "Open from 9 to 5."}]]
    )
    """Documents for the chat template, for example with `title` and `text` (vLLM's field). If the
    template does not read them, the response is 400."""

    @property
    def opens_answer(self) -> bool:
        """Return whether the prompt ends with the head of an assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatRequest(GenerationRequest, TurnFields):
    """POST /v1/chat/completions."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_field: ClassVar[str] = "messages"
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NEUTRAL,
        "modalities": (None, ["text"]),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "echo": (None, False),
        "best_of": (None, 1),
        "include_reasoning": (None, True),
    }

    instead: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.instead,
        "prompt": "`messages` (`prompt` is a field of /v1/completions)",
        "functions": "`tools`",
        "function_call": "`tool_choice`",
    }

    messages: Messages
    """The conversation, whose fields are below."""
    max_tokens: int | None = Field(None, ge=1, le=INT64, examples=[100])
    """The most tokens of an answer. Default: up to the longest context (docs/reference/rope.md)."""
    max_completion_tokens: int | None = Field(None, ge=1, le=INT64, examples=[100])
    """Another name of `max_tokens`. If a request has both, they must be equal."""
    logprobs: bool | None = None
    """Reports the logprobs of the answer's tokens. Default: false."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, examples=[3])
    """Number of alternatives per token, at most 20. Needs `logprobs`. Default: 0."""
    add_special_tokens: bool | None = None
    """Adds the special tokens in front of the prompt (vLLM's field). A prompt that begins with them
    has them once all the same. Default: false, because chat templates write their own."""
    prediction: Prediction | None = None
    """Text that the answer probably contains. It changes the speed, and on a CPU no answer. Without
    drafts it has no effect, and the usage counts none (docs/design/speculation.md)."""
    parallel_tool_calls: bool | None = None
    """With false, an answer has one call at most. Otherwise it has at most 8.
    Default: true."""
    modalities: list[str] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    echo: bool | None = None
    best_of: int | None = None
    include_reasoning: bool | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a field and its problem for each conflict."""
        yield from super().conflicts()
        if self.top_logprobs and not self.logprobs:
            yield ("top_logprobs", "needs `logprobs`: true")
        two = self.max_tokens, self.max_completion_tokens
        if None not in two and two[0] != two[1]:
            yield ("max_tokens", "differs from `max_completion_tokens`: give one")
        yield from problems_of_opening(
            self.messages, opens=self.add_generation_prompt, continues=self.continue_final_message
        )
        yield from problems_of_choice(self.tools or (), self.tool_choice)
        yield from problems_of_results(self.messages)
        if self.tools and self.tool_choice != "none" and self.ignore_eos:
            yield ("ignore_eos", "cannot be true together with `tools`")

    @property
    def asked_max_tokens(self) -> int | None:
        """Return the limit under either of OpenAI's names; None: to the end of the tier."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
