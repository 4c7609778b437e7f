"""A turn of a conversation, whatever route it came by: into a prompt, a grammar, a reading plan.

A route builds a ChatTurn, prepares it inside its reservation, submits the prompt, and reads each
choice with a ChoiceReader (`part_answer.py`). Neither knows a body or an answer of HTTP.
"""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.text.grammar import Grammar, Lark
from ropewalk.model_runtime.text.tools.answer_reader import ReadingPlan
from ropewalk.model_runtime.text.tools.argument_schema import arguments_schema
from ropewalk.model_runtime.text.tools.call_grammar import AnswerGrammar, Mode, Thinking
from ropewalk.model_runtime.text.tools.instructions import with_instructions
from ropewalk.model_runtime.text.tools.tool_format import (
    GENERIC,
    ReasoningFormat,
    Tool,
    special_ids,
)
from ropewalk.server.api.service import Service
from ropewalk.server.api.structured_schema import AskedAnswer
from ropewalk.server.turns.tool_schema import CallChoice

_MAX_CALLS = 8  # in an answer

_SWITCHES = ("enable_thinking", "thinking")  # of reasoning, in chat templates


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """The request of a conversation to the model."""

    messages: Sequence[Mapping[str, Any]]  # in the shape that chat templates read
    opens_answer: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] | None = None  # of the chat template
    documents: Sequence[Mapping[str, Any]] | None = None  # for the chat template
    reasoning_effort: str | None = None
    tools: Sequence[Tool] = ()
    choice: CallChoice = field(default_factory=CallChoice)
    is_parallel: bool = True  # several calls in one answer
    answer: AskedAnswer | None = None  # of an answer that is no call; None: any text
    whitespace: str | None = None  # pattern for JSON; None: the server's own

    @property
    def callable_tools(self) -> list[Tool]:
        """Return the tools that the answer may call."""
        if self.choice.mode == "none":
            return []
        names = self.choice.names
        return [tool for tool in self.tools if names is None or tool.name in names]


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    """A turn that can be submitted."""

    prompt_ids: tuple[int, ...]
    grammar: Grammar | None
    shown_ids: frozenset[int]  # special tokens that the answer's text contains
    masked_id: int | None  # a token that the answer must not have
    plan: ReadingPlan | None  # None: the answer is text


async def prepare(service: Service, turn: ChatTurn) -> PreparedTurn:
    """Render, tokenise and compile a turn, off the event loop. Raises RequestError."""
    formats = service.chat_formats
    if turn.callable_tools:
        await asyncio.to_thread(_check_tools, service, turn.callable_tools)
    text = await render(service, turn)
    token_ids = await prompt_ids(service, turn, text)
    thinking = _thinking(formats.reasoning, text, turn)
    splits = formats.reasoning is not None and service.settings.reasoning == "split"
    tools = turn.callable_tools
    grammar = await _grammar(service, turn, thinking, splits=splits)
    plan = None
    if tools or splits:
        plan = ReadingPlan(
            formats.tools if tools else None,
            {tool.name: tool for tool in tools},
            formats.reasoning if splits else None,
            begins_in_reasoning=splits and thinking is Thinking.BEGUN,
            is_held=bool(tools) and grammar is not None,
        )
    masked = None
    if turn.tools and turn.choice.mode == "none" and formats.tools is not None:
        masked = service.tokenizer.token_id(formats.tools.marker)
    return PreparedTurn(token_ids, grammar, _shown_ids(service, plan), masked, plan)


def _shown_ids(service: Service, plan: ReadingPlan | None) -> frozenset[int]:
    """Return the special tokens within the markers that an answer is read by."""
    if plan is None:
        return frozenset()
    texts = [] if plan.tool_format is None else [*plan.tool_format.texts()]
    if plan.reasoning is not None:
        texts += [plan.reasoning.open, plan.reasoning.close]
    return frozenset(special_ids(iter(texts), service.chat_formats.special).values())


async def prompt_ids(service: Service, turn: ChatTurn, text: str) -> tuple[int, ...]:
    """Tokenise a rendered turn. Raises RequestError."""
    # Templates write the special tokens themselves, except for the fallback.
    add_special_tokens = turn.add_special_tokens or service.chat_template.is_fallback
    return await service.tokenize(text, add_special_tokens=add_special_tokens, param="messages")


async def render(service: Service, turn: ChatTurn) -> str:
    """Render a turn into the text of its prompt. Raises RequestError."""
    formats = service.chat_formats
    if turn.tools and formats.tools is None:
        raise RequestError("`tools` are not served (tool_format is none)", param="tools")
    messages: Sequence[Mapping[str, Any]] = turn.messages
    tools = [] if turn.choice.mode == "none" else list(turn.tools)
    service.check_length(_num_characters(turn), "messages")
    rendered_tools: list[dict[str, Any]] = []
    tool_format = formats.tools
    if tool_format is not None and tool_format.in_template:
        messages = _with_names(messages)
        rendered_tools = [tool.for_template() for tool in tools]
    elif tools or any(each["role"] == "tool" or each.get("tool_calls") for each in messages):
        messages = with_instructions(
            messages, tools, tool_format or GENERIC, reads_system=formats.reads_system
        )
    template = service.chat_template.picked(
        has_tools=bool(rendered_tools), has_documents=bool(turn.documents)
    )
    if turn.documents and not template.reads_documents:
        raise RequestError(
            "`documents` are not read by this model's chat template", param="documents"
        )
    allowed = service.settings.allowed_chat_template_kwargs
    rendering = template.submit(
        messages,
        add_generation_prompt=turn.opens_answer,
        continue_final_message=turn.continue_final_message,
        variables={
            **_effort_variables(template.variables, allowed, turn.reasoning_effort),
            **_checked_variables(template.variables, allowed, turn.variables or {}),
        },
        tools=rendered_tools,
        documents=turn.documents,
    )
    return await asyncio.wrap_future(rendering)


def _checked_variables(
    read: Collection[str], allowed: Collection[str], variables: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the variables without those that ask nothing of a template that reads `read`.

    Raises RequestError for one that the operator does not allow or that the template does not read.
    """
    used: dict[str, Any] = {}
    for name, value in variables.items():
        asks_nothing = value is None or (value is False and name in _SWITCHES)
        if asks_nothing and name not in read:
            continue  # clients turn reasoning off for models that have none
        if name not in allowed:
            raise RequestError(
                f"`chat_template_kwargs` may contain {', '.join(sorted(allowed)) or 'nothing'}. "
                f"Given: {name[:64]!a}",
                param="chat_template_kwargs",
            )
        if name not in read:
            raise RequestError(
                f"`chat_template_kwargs.{name}` is not read by this model's chat template",
                param="chat_template_kwargs",
            )
        used[name] = value
    return used


def _num_characters(turn: ChatTurn) -> int:
    """Return a lower bound of the prompt's characters, which costs little."""
    texts = sum(len(message["content"]) for message in turn.messages)
    return texts + sum(len(tool.description or "") for tool in turn.tools)


def _with_names(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the function's name in each result, which some templates read."""
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    return [
        {"name": names[message["tool_call_id"]], **message}
        if message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _effort_variables(
    read: Collection[str], allowed: Collection[str], effort: str | None
) -> dict[str, Any]:
    """Return a template's variables for OpenAI's `reasoning_effort`.

    If the template reads no effort but a switch, then `none` turns it off and the others on.
    Raises RequestError if the operator allows none of the variables that the template reads.
    """
    if effort is None:
        return {}
    found: dict[str, Any] = {"reasoning_effort": effort}
    if "reasoning_effort" not in read:
        found = {name: effort != "none" for name in _SWITCHES if name in read}
    if found and not found.keys() & set(allowed):
        raise RequestError(
            f"`reasoning_effort` sets {next(iter(found))} of this model's chat template, which "
            "allowed_chat_template_kwargs must contain, remove the field",
            param="reasoning_effort",
        )
    return {name: value for name, value in found.items() if name in allowed}


def _thinking(reasoning: ReasoningFormat | None, prompt: str, turn: ChatTurn) -> Thinking:
    """Return whether the answer begins with reasoning, by the end of its prompt."""
    if reasoning is None or turn.continue_final_message:
        return Thinking.NO
    end = prompt.rstrip()
    if end.endswith(reasoning.open):
        return Thinking.BEGUN
    return Thinking.NO if end.endswith(reasoning.close) else Thinking.MAYBE


async def _grammar(
    service: Service, turn: ChatTurn, thinking: Thinking, *, splits: bool
) -> Grammar | None:
    """Compile the grammar of an answer; None if it may be any text. Raises RequestError."""
    tools = turn.callable_tools
    formats, compiler = service.chat_formats, service.grammars
    answer = turn.answer
    if not tools:
        if answer is None:
            return None
        if not splits or thinking is Thinking.NO:
            return await service.grammar(answer, turn.whitespace)
    elif _is_free(turn, tools):
        return None
    answer_schema = answer_rule = None
    if answer is not None and answer.rule is not None:
        answer_rule = compiler.checked_size(answer.rule, answer.field)
    elif answer is not None:
        schema = answer.schema or {}
        answer_schema = await asyncio.to_thread(compiler.text_of, schema, answer.field)
    asked = AnswerGrammar(
        mode=_mode(turn, has_tools=bool(tools)),
        whitespace=compiler.whitespace_of(turn.whitespace),
        tool_format=formats.tools,
        tools=tools,
        max_calls=_max_calls(turn),
        answer_schema=answer_schema,
        answer_rule=answer_rule,
        reasoning=formats.reasoning,
        thinking=thinking,
    )
    field = "tools" if answer is None else answer.field
    try:
        return await _compiled(service, asked, field)
    except RequestError as error:
        for tool in tools:
            if _label(tool) in str(error):
                raise RequestError(str(error), param=tool.field) from error
        await _blame(service, asked)
        raise


def _max_calls(turn: ChatTurn) -> int:
    is_parallel = turn.is_parallel and not turn.choice.is_named
    return _MAX_CALLS if is_parallel else 1


def _is_free(turn: ChatTurn, tools: Sequence[Tool]) -> bool:
    """Return whether an answer with tools may be any text."""
    is_auto = turn.choice.mode == "auto" and turn.answer is None
    return is_auto and turn.is_parallel and not any(tool.is_strict for tool in tools)


def _mode(turn: ChatTurn, *, has_tools: bool) -> Mode:
    if not has_tools:
        return Mode.JSON
    if turn.choice.mode == "required":
        return Mode.CALLS
    return Mode.TEXT_AND_CALLS if turn.answer is None else Mode.CALLS_OR_JSON


def _check_tools(service: Service, tools: Sequence[Tool]) -> None:
    """Check the schemas without compiling them. Raises RequestError, which names the function."""
    num_bytes = 0
    for tool in tools:
        if not tool.is_strict:
            continue
        try:
            num_bytes += len(service.grammars.json_of(tool.parameters or {}, "tools"))
            schema = arguments_schema(tool)
        except RequestError as error:
            raise _of_tool(tool, error) from error
        if schema.get("type") != "object":
            problem = RequestError("`tools`: the type of `parameters` must be object")
            raise _of_tool(tool, problem)
    limit = service.grammars.max_bytes
    if num_bytes > limit:
        raise RequestError(
            f"`tools` must have schemas of at most {limit} bytes together. Given: {num_bytes}",
            param="tools",
        )


async def _blame(service: Service, asked: AnswerGrammar) -> None:
    """Raise RequestError for the first tool whose schema alone cannot be compiled."""
    for tool in asked.tools:
        if not tool.is_strict:
            continue
        try:
            await _compiled(service, asked.for_one(tool), "tools")
        except RequestError as error:
            raise _of_tool(tool, error) from error


def _of_tool(tool: Tool, error: RequestError) -> RequestError:
    return RequestError(f"{error} ({_label(tool)})", param=tool.field)


def _label(tool: Tool) -> str:
    return f'function {tool.name!a}; with "strict": false its arguments may be any object'


async def _compiled(service: Service, asked: AnswerGrammar, field: str) -> Grammar:
    special = service.chat_formats.special
    strict = [tool for tool in asked.tools if tool.is_strict]
    lark = Lark(
        asked.lark(special),
        asked.lark({}),
        field,
        asked.whitespace,
        tuple((_label(tool), json.dumps(arguments_schema(tool))) for tool in strict),
    )
    return await asyncio.wrap_future(service.grammars.compile_lark(lark))
