"""Find how a model writes tool calls: render a conversation with known calls and read them back.

The markers come from the chat template itself, so templates that no table lists work, too. A
format is served only if the calls that were rendered are read back with equal names and arguments.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.model_runtime.errors import ModelError, RequestError, TemplateLimitError
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.tools.answer_reader import AnswerReader, ReadingPlan
from ropewalk.model_runtime.text.tools.call_stream import whole_calls
from ropewalk.model_runtime.text.tools.tool_format import (
    GENERIC,
    KNOWN_FORMATS,
    REASONING_FORMATS,
    ReasoningFormat,
    Tool,
    ToolCall,
    ToolFormat,
    known_name,
    special_ids,
)

FORMAT_NAMES = ("auto", "none", *KNOWN_FORMATS)
_NAME = "look_up_weather"
_CALLS = (
    ToolCall(_NAME, {"city": "Paris", "days": 3}),
    ToolCall(_NAME, {"city": "Rome", "days": 7}),
)
_TOOL = Tool(
    _NAME,
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A city."},
            "days": {"type": "integer", "description": "How many."},
        },
        "required": ["city", "days"],
    },
)
_PLAIN = "Plain words."


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How a model writes the parts of its answers."""

    tools: ToolFormat | None  # None: the operator serves no tools
    reasoning: ReasoningFormat | None
    special: Mapping[str, int]  # special tokens within the markers: text -> id
    reads_system: bool  # the chat template accepts a system message


def find_formats(
    template: ChatTemplate, special: Mapping[str, int], asked: str = "auto"
) -> ChatFormats:
    """Find the formats of a chat template. `special`: every special token's text and id.

    `asked` is the setting: one of FORMAT_NAMES. Raises ModelError for a name that is none of them,
    or for a template that exceeds its limits on a short conversation.
    """
    if asked not in FORMAT_NAMES:
        raise ModelError(f"tool_format must be one of {', '.join(FORMAT_NAMES)}. Given: {asked!a}")
    try:
        return _found(template, special, asked)
    except TemplateLimitError as error:
        raise ModelError(f"the chat template {error.excess} on a short conversation") from error


def _found(template: ChatTemplate, special: Mapping[str, int], asked: str) -> ChatFormats:
    """Find the formats. Raises TemplateLimitError."""
    reasoning = _reasoning(template, special)
    tools: ToolFormat | None
    if asked == "none":
        tools = None
    elif asked == "auto":
        tools = _probed(template) or GENERIC
    else:
        tools = replace(KNOWN_FORMATS[asked], in_template=_knows_tools(template))
    texts = [] if tools is None else [*tools.texts()]
    texts += [] if reasoning is None else [reasoning.open, reasoning.close]
    return ChatFormats(tools, reasoning, special_ids(iter(texts), special), _reads_system(template))


def _reasoning(template: ChatTemplate, special: Mapping[str, int]) -> ReasoningFormat | None:
    texts = template.texts.values()
    for each in REASONING_FORMATS:
        if any(each.close in text for text in texts) or {each.open, each.close} <= special.keys():
            return each
    return None


def _rendered(
    template: ChatTemplate, answer: Mapping[str, Any] | None, tools: Sequence[Tool] = ()
) -> str | None:
    """Return a short conversation as the template writes it; None if the template refuses it."""
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "Hello."}]
    if answer is not None:
        messages.append(answer)
    try:
        return template.picked(has_tools=bool(tools)).render(
            messages,
            add_generation_prompt=answer is None,
            tools=[tool.for_template() for tool in tools],
        )
    except TemplateLimitError:
        raise
    except RequestError:
        return None


def _reads_system(template: ChatTemplate) -> bool:
    messages = [{"role": "system", "content": _PLAIN}, {"role": "user", "content": "Hello."}]
    try:
        return _PLAIN in template.render(messages)
    except TemplateLimitError:
        raise
    except RequestError:
        return False


def _knows_tools(template: ChatTemplate) -> bool:
    text = _rendered(template, None, [_TOOL])
    return text is not None and _NAME in text


def _answer_text(template: ChatTemplate, calls: Sequence[ToolCall]) -> str | None:
    """Return what the template writes for an answer of these calls; None if it cannot."""
    head = _rendered(template, None, [_TOOL])
    plain = _rendered(template, {"role": "assistant", "content": _PLAIN}, [_TOOL])
    written = [
        {
            "id": f"call0000{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for index, call in enumerate(calls)
    ]
    whole = _rendered(
        template, {"role": "assistant", "content": "", "tool_calls": written}, [_TOOL]
    )
    if head is None or plain is None or whole is None or _NAME not in head:
        return None
    shared = head if whole.startswith(head) else _common(whole, plain)
    text = whole[len(shared) :]
    end = plain.rpartition(_PLAIN)[2]  # the end of a turn
    return text.removesuffix(end).strip() if end else text.strip()


def _common(one: str, two: str) -> str:
    length = next(
        (at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )
    return one[:length]


def _probed(template: ChatTemplate) -> ToolFormat | None:
    """Return the format that the template writes; None if there is none that can be read back."""
    one = _answer_text(template, _CALLS[:1])
    if one is None:
        return None
    for reasoning in REASONING_FORMATS:  # an empty block that the template writes
        if one.startswith(reasoning.open):
            one = one.partition(reasoning.close)[2].strip()
    two = _answer_text(template, _CALLS)
    for derive in (_json_format, _tagged_format, _python_format, _named_format):
        found = derive(one, two)
        if found is None:
            continue
        found = replace(found, name=known_name(found))
        if _reads_back(found, one, _CALLS[:1]):
            several = "" if two is None else two[two.find(found.marker) :]
            return found if _reads_back(found, several, _CALLS) else replace(found, between=None)
    return None


def _reads_back(found: ToolFormat, text: str, calls: Sequence[ToolCall]) -> bool:
    reader = AnswerReader(ReadingPlan(found, {_NAME: _TOOL}))
    return whole_calls([*reader.feed(text), *reader.finish(is_cut=False)]) == list(calls)


def _json_values(text: str) -> list[tuple[int, int, Any]]:
    """Return the outermost JSON objects and lists in a text: start, end, value."""
    found, at = [], 0
    while at < len(text):
        if text[at] in "{[":
            try:
                value, end = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                at += 1
                continue
            found.append((at, end, value))
            at = end
        else:
            at += 1
    return found


def _json_format(one: str, two: str | None) -> ToolFormat | None:
    for start, end, value in _json_values(one):
        is_list = isinstance(value, list)
        item = value[0] if is_list and len(value) == 1 else value
        if not isinstance(item, dict) or item.get("name") != _NAME:
            continue
        key = next((key for key in item if item[key] == _CALLS[0].arguments), None)
        if key not in {"arguments", "parameters"}:
            return None
        marker, close = one[:start], one[end:]
        between = '}, {"name": "' if is_list else None
        if not is_list and two is not None and (values := _json_values(two))[1:]:
            between = "}" + two[values[0][1] : values[1][0]] + '{"name": "'
        return ToolFormat(
            name="",
            shape="json",
            head=f'{marker}{"[" * is_list}{{"name": "',
            middle=f'", "{key}": ',
            between=between,
            tail=f"}}{']' * is_list}{close}",
            marker=marker.strip(),
            close=close.strip(),
            arguments_key=str(key),
        )
    return None


def _tagged_format(one: str, two: str | None) -> ToolFormat | None:
    found = re.fullmatch(
        r"(?P<marker>.*?)(?P<head><function=)look_up_weather(?P<middle>>\n?)"
        r"<parameter=city>\n?Paris\n?</parameter>\s*<parameter=days>\n?3\n?</parameter>\s*"
        r"(?P<tail></function>(?P<close>.*))",
        one,
        re.DOTALL,
    )
    if found is None or not found["marker"].strip() or not found["close"].strip():
        return None
    between = None
    if two is not None:
        between = two.partition("</function>")[2].partition("<function=")[0]
        between = f"</function>{between}<function="
    return ToolFormat(
        name="",
        shape="tagged",
        head=found["marker"] + found["head"],
        middle=found["middle"],
        between=between,
        tail=found["tail"],
        marker=found["marker"].strip(),
        close=found["close"].strip(),
    )


def _python_format(one: str, two: str | None) -> ToolFormat | None:
    found = re.fullmatch(
        r"(?P<marker>[^\[]*)\[look_up_weather\(.*\)\](?P<close>.*)", one, re.DOTALL
    )
    if found is None:
        return None
    marker, close = found["marker"], found["close"]
    return ToolFormat(
        name="",
        shape="python",
        head=f"{marker}[",
        middle="(",
        between=None if two is None else "), ",
        tail=f")]{close}",
        marker=marker.strip(),
        close=close.strip(),
    )


def _named_format(one: str, two: str | None) -> ToolFormat | None:
    values = [each for each in _json_values(one) if each[2] == _CALLS[0].arguments]
    at = one.find(_NAME)
    if not values or at < 0 or values[0][0] < at:
        return None
    start, end, _ = values[0]
    head, tail = one[:at], one[end:]
    if not head.strip():
        return None  # nothing shows that a call begins
    between = None
    if two is not None:
        first = next((each for each in _json_values(two) if each[2] == _CALLS[0].arguments), None)
        if first is not None and _NAME in two[first[1] :]:
            between = two[first[1] :].partition(_NAME)[0]
    return ToolFormat(
        name="",
        shape="named",
        head=head,
        middle=one[at + len(_NAME) : start],
        between=between,
        tail=tail,
        marker=head.strip(),
        close=tail.strip(),
    )
