"""Formats found in chat templates, and tools written into templates that know none."""

import json
from typing import Any

import pytest

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.tools.find_format import find_formats
from ropewalk.model_runtime.text.tools.instructions import with_instructions
from ropewalk.model_runtime.text.tools.tool_format import GENERIC, ReasoningFormat, Tool
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.tool_templates import (
    HERMES,
    LLAMA,
    MISTRAL,
    NO_TOOLS,
    STRICT_TURNS,
    THINKING,
    TOOL_TEMPLATES,
)

LOOK = Tool("look", "Looks.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "look", "arguments": {"city": "Paris"}},
}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "Let me.", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "abcdefghi"},
    {"role": "tool", "content": "wind", "tool_call_id": "abcdefghi"},
    {"role": "user", "content": "And?"},
]


def template_of(text: str | None) -> ChatTemplate:
    """A template over a byte tokenizer."""
    return ChatTemplate(text, byte_tokenizer_fast().special_tokens_map)


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_the_format_is_found_by_rendering_a_call(name: str) -> None:
    """No setting has to name the model's family."""
    text, expected = TOOL_TEMPLATES[name]
    found = find_formats(template_of(text), {}).tools
    assert found is not None
    assert (found.name, found.in_template) == (expected, expected != "generic")


def test_one_call_where_the_template_writes_one() -> None:
    """Llama 3.1's template refuses several, so the format has none between two."""
    one, several = (find_formats(template_of(text), {}).tools for text in (LLAMA, HERMES))
    assert one is not None
    assert several is not None
    assert one.between is None
    assert several.between == '}\n</tool_call>\n<tool_call>\n{"name": "'


def test_special_tokens_within_the_markers_are_found() -> None:
    """A decoder leaves special tokens out, and a grammar writes them in another way."""
    special = {"[TOOL_CALLS]": 7, "<s>": 1, "": 2}
    assert find_formats(template_of(MISTRAL), special).special == {"[TOOL_CALLS]": 7}


def test_reasoning_is_found_by_its_marker() -> None:
    """In the template, or among the special tokens."""
    think = ReasoningFormat("<think>", "</think>")
    assert find_formats(template_of(THINKING), {}).reasoning == think
    assert find_formats(template_of(HERMES), {}).reasoning is None
    assert find_formats(template_of(HERMES), {"<think>": 1, "</think>": 2}).reasoning == think


def test_the_operator_may_name_a_format() -> None:
    """The template then writes the tools only if it knows them."""
    named = find_formats(template_of(NO_TOOLS), {}, "mistral").tools
    assert named is not None
    assert (named.name, named.in_template) == ("mistral", False)
    known = find_formats(template_of(HERMES), {}, "llama-json").tools
    assert known is not None
    assert known.in_template
    assert find_formats(template_of(HERMES), {}, "none").tools is None
    with pytest.raises(ModelError, match="tool_format must be one of auto, none, hermes"):
        find_formats(template_of(HERMES), {}, "herms")


def test_a_template_without_tools_gets_instructions() -> None:
    """The system message has them after its own text, and results come from the user."""
    system = {"role": "system", "content": "Be brief."}
    found = with_instructions([system, *TALK], [LOOK], GENERIC, reads_system=True)
    assert [each["role"] for each in found] == ["system", "user", "assistant", "user"]
    assert found[0]["content"].startswith("Be brief.\n\nYou may call these functions:\n{")
    assert json.dumps(LOOK.for_template()["function"]) in found[0]["content"]
    call = '<tool_call>{"name": "look", "arguments": {"city": "Paris"}}</tool_call>'
    assert found[2]["content"] == f"Let me.\n{call}"
    assert found[3]["content"] == (
        "<tool_response>\nsun\n</tool_response>\n<tool_response>\nwind\n</tool_response>\nAnd?"
    )


def test_without_a_system_message_the_first_user_has_them() -> None:
    """A template that wants alternating turns renders the whole talk."""
    template = template_of(STRICT_TURNS)
    assert not find_formats(template, {}).reads_system
    found = with_instructions(TALK, [LOOK], GENERIC, reads_system=False)
    text = template.render(found)
    assert "You may call these functions" in text
    assert text.index("Weather?") < text.index("You may call")
