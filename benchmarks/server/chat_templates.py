"""`python -m benchmarks.server.chat_templates`: a chat's rendering beside transformers' own.

A server renders a template in a process with limits, on a thread beside the event loop. Its
contender is transformers' `apply_chat_template` in the server's own process, on such a thread, too.
Both are asked in turns, as a route asks, and both texts must be equal.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import click
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.text.chat_template import ChatTemplate

_MOST_MS = 1.0  # added at the median
# As those of instruction-tuned models: roles, tools as JSON, calls, results.
_TEMPLATE = """{%- if tools %}<|system|>You may call:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('no such role') }}
{%- endif %}
{{- '<|' + message.role + '|>' }}
{{- message.content | trim }}
{%- for call in message.tool_calls or [] %}
<call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' }}{{ call.function.arguments | tojson }}}</call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up. " * 10,
        "parameters": {
            "type": "object",
            "properties": {f"field_{at}": {"type": "string"} for at in range(10)},
        },
    },
}
_CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": {"a": "b"}}}


def _chat(num_messages: int, num_characters: int) -> list[dict[str, Any]]:
    words = ("The quick brown fox jumps over the lazy dog. " * (num_characters // 45 + 1)).strip()
    content = words[:num_characters].strip()
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": content} for at in range(num_messages)]


def cases() -> dict[str, dict[str, Any]]:
    """Return the chats by name: messages and tools."""
    calls = _chat(21, 400)
    for message in calls[1::2]:
        message["tool_calls"] = [_CALL]
    return {
        "1 message of 40 characters": {"messages": _chat(1, 40), "tools": []},
        "21 messages of 400": {"messages": _chat(21, 400), "tools": []},
        "21 messages, 10 tools, calls": {"messages": calls, "tools": [_TOOL] * 10},
        "201 messages of 2,000": {"messages": _chat(201, 2000), "tools": []},
    }


async def _timed(ask: Callable[[], Awaitable[str]]) -> tuple[str, float]:
    began = time.perf_counter()
    text = await ask()
    return text, time.perf_counter() - began


async def measured(
    tokenizer: PreTrainedTokenizerBase, chat: dict[str, Any], num_turns: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of transformers and of the server's way, one of each per turn."""
    template = ChatTemplate(_TEMPLATE, tokenizer.special_tokens_map)
    messages, tools = chat["messages"], chat["tools"]
    asked = {"tokenize": False, "add_generation_prompt": True, "chat_template": _TEMPLATE}
    theirs, ours = list[float](), list[float]()
    for _ in range(num_turns):
        expected, seconds = await _timed(
            lambda: asyncio.to_thread(
                tokenizer.apply_chat_template, messages, tools=tools or None, **asked
            )
        )
        theirs.append(seconds)
        text, seconds = await _timed(
            lambda: asyncio.wrap_future(template.submit(messages, tools=tools))
        )
        ours.append(seconds)
        if text != expected:
            raise click.ClickException("the texts differ")
    return theirs, ours


@click.command()
@click.option("--turns", default=500, show_default=True, help="Renderings of each chat, each way.")
def main(turns: int) -> None:
    """Measure a few chats. Ends with 1 if more than a millisecond is added at a median."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    click.echo("| chat | transformers, ms | in a process, ms | added | p99 added |")
    click.echo("|---|---:|---:|---:|---:|")
    worst = 0.0
    for name, chat in cases().items():
        theirs, ours = asyncio.run(measured(tokenizer, chat, turns))
        before, after = (1e3 * statistics.median(each) for each in (theirs, ours))
        late = 1e3 * (sorted(ours)[int(0.99 * turns)] - sorted(theirs)[int(0.99 * turns)])
        worst = max(worst, after - before)
        click.echo(f"| {name} | {before:.2f} | {after:.2f} | {after - before:+.2f} | {late:+.2f} |")
    if worst > _MOST_MS:
        raise click.ClickException(f"{worst:.2f} ms added at the median, most {_MOST_MS:g}")


if __name__ == "__main__":
    main()
