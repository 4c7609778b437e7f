"""Tools in the prompt of a chat template that knows none: our own instructions, calls as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.model_runtime.text.tools.tool_format import Tool, ToolFormat

Messages = list[dict[str, Any]]


def with_instructions(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    found: ToolFormat,
    *,
    reads_system: bool,
) -> Messages:
    """Return messages of system, user and assistant only, which say what the tools are.

    Calls become text in the format, and results become messages of the user. If the template has no
    system message (`reads_system`), the first message of the user has the instructions.
    """
    plain = _plain(messages, found)
    if not tools:
        return plain
    text = _instructions(tools, found)
    first = plain[0] if plain else None
    if first is not None and first["role"] == ("system" if reads_system else "user"):
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *plain[1:]]
    role = "system" if reads_system else "user"
    return [{"role": role, "content": text}, *plain]


def call_text(found: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls in the format, as the model should write them."""
    written = [
        f"{name}{found.middle}{json.dumps(arguments, ensure_ascii=False)}"
        for name, arguments in calls
    ]
    if found.between is None:
        return "\n".join(f"{found.head}{each}{found.tail}" for each in written)
    return f"{found.head}{found.between.join(written)}{found.tail}"


def _instructions(tools: Sequence[Tool], found: ToolFormat) -> str:
    listed = "\n".join(
        json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools
    )
    example = f"{found.head}NAME{found.middle}{{...}}{found.tail}"
    return (
        f"You may call these functions:\n{listed}\n"
        f"To call one, write its name and its arguments as JSON:\n{example}\n"
        "The results follow in the next message."
    )


def _plain(messages: Sequence[Mapping[str, Any]], found: ToolFormat) -> Messages:
    plain: Messages = []
    after_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        if message.get("tool_calls"):
            calls = [
                (each["function"]["name"], each["function"]["arguments"])
                for each in message["tool_calls"]
            ]
            content = "\n".join(filter(None, [content, call_text(found, calls)]))
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        is_result = role == "tool"
        if after_result and role in {"tool", "user"}:
            # Many templates want turns of user and assistant that alternate.
            plain[-1]["content"] += f"\n{content}"
        else:
            kept = {key: message[key] for key in ("name",) if key in message and not is_result}
            plain.append({"role": "user" if is_result else role, "content": content, **kept})
        after_result = is_result
    return plain
