"""The prompt text made of messages, against transformers' own rendering."""

from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from ropewalk.model_runtime.errors import ModelError, RequestError
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.text.chat_template import RESERVED, ChatTemplate, own_templates
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.tool_templates import TOOL_TEMPLATES

# In the manner of those that come with instruction-tuned models.
TEMPLATE = """{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}
{{ raise_exception('no such role: ' + message.role) }}
{%- endif -%}
<|{{ message.role }}|>{% generation %}{{ message.content | trim }}{% endgeneration %}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- if thinking -%}<think>{%- endif -%}{%- endif -%}"""
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " import os "},
    {"role": "assistant", "content": "import sys"},
]


@pytest.fixture
def tokenizer() -> Any:
    """The embedded model's tokenizer under transformers."""
    return AutoTokenizer.from_pretrained(EMBEDDED_MODEL)


def test_the_tokenizers_own_template_is_used(tokenizer: Any) -> None:
    """The reference is transformers' rendering of the same messages."""
    tokenizer.chat_template = TEMPLATE
    chat = ChatTemplate(own_templates(tokenizer)["default"], tokenizer.special_tokens_map)
    assert (chat.is_fallback, chat.stop) == (False, ())
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert chat.render(MESSAGES, **options) == expected
    expected = tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, thinking=True
    )
    assert expected.endswith("<think>")
    assert chat.render(MESSAGES, variables={"thinking": True}) == expected


# Features beside Jinja itself, and places where the environment shows.
FEATURES = {
    "blocks": "{% for m in messages %}\n    {% if m.role %}\n  {{ m.role }}\n{% endif %}\n"
    "{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
    "{% break %}{% endfor %}",
    "JSON": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[0] | "
    "tojson(true, separators=(',', ':'), sort_keys=true) }}{{ '<é>' | tojson }}",
    "functions": "{% set n = namespace(a=1, self=2) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n.self }}"
    "{{ dict(a=1).a }}{{ dict.fromkeys('ab', 1) }}{{ strftime_now('%Y') }}{{ range(3) | list }}",
    "scopes": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    "{% generation -%}\n b {%- endgeneration %}",
    "macros": "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(messages[0].content) }}",
    "names": "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}"
    "{{ missing is defined }}{{ messages[0].missing is defined }}",
    "values": "{{ messages }}{{ messages[1] }}{{ add_generation_prompt }}",
}
ODD_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "<é> & \ud800 \N{GRINNING FACE} \x00", "name": None},
    {"role": "assistant", "content": "a", "reasoning": "b", "number": 1e-7, "big": 10**30},
    {"role": "assistant", "content": "a", "thinking": "c", "reasoning_content": None},
    {"role": "user", "content": "", "nested": {"a": [1, None, True, {"b": float("inf")}]}},
]


@pytest.mark.parametrize("name", FEATURES)
def test_a_template_reads_what_it_reads_in_transformers(tokenizer: Any, name: str) -> None:
    """Messages have nulls, several names for their reasoning, and a half of a character."""
    chat = ChatTemplate(FEATURES[name], tokenizer.special_tokens_map)
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        expected = tokenizer.apply_chat_template(
            ODD_MESSAGES, chat_template=FEATURES[name], tokenize=False, **options
        )
        assert chat.render(ODD_MESSAGES, **options) == expected


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_calls_are_written_as_in_transformers(name: str) -> None:
    """Templates in the manner of known families write tools, calls and results."""
    fast, text = byte_tokenizer_fast(), TOOL_TEMPLATES[name][0]
    function = {"name": "f", "arguments": {"a": "é", "b": [1, 2.5]}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call00000", "name": "f"},
        {"role": "assistant", "content": " It is three. "},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for chat, continues in ((messages[:1], False), (messages[:3], False), (messages, True)):
        options: dict[str, Any] = {
            "add_generation_prompt": not continues, "continue_final_message": continues,
        }  # fmt: skip
        template = ChatTemplate(text, fast.special_tokens_map)
        try:
            expected = fast.apply_chat_template(
                chat, chat_template=text, tools=tools, tokenize=False, **options
            )
        except TemplateError as error:
            with pytest.raises(RequestError, match=f"refuses them: {error}"):
                template.render(chat, tools=tools, **options)
        else:
            assert template.render(chat, tools=tools, **options) == expected


@pytest.mark.parametrize("content", ["a", " a ", "a\n", "<the prompt ends here>"])
@pytest.mark.parametrize(
    "written", ["{{ m.content }}", "{{ m.content | trim }}|", "{{ m.content }} "]
)
def test_a_continued_message_ends_as_in_transformers(
    tokenizer: Any, content: str, written: str
) -> None:
    """The spaces at its end stay, unless the template strips messages."""
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": content}]
    text = "{% for m in messages %}<" + written + ">{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = tokenizer.apply_chat_template(
        messages, chat_template=text, tokenize=False, **options
    )
    assert ChatTemplate(text, tokenizer.special_tokens_map).render(messages, **options) == expected


def test_a_message_that_a_template_leaves_out_is_not_continued(tokenizer: Any) -> None:
    """The error names the field."""
    for text in ("{{ messages[0].content }}", "{{ messages[1].content | upper }}"):
        messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]
        with pytest.raises(RequestError, match="writes the last message as it is") as raised:
            ChatTemplate(text, tokenizer.special_tokens_map).render(
                messages, continue_final_message=True
            )
        assert raised.value.param == "continue_final_message"


def test_without_a_template_messages_are_a_transcript(tokenizer: Any) -> None:
    """A base model continues such a text, and it stops before the user's next turn."""
    tokenizer.chat_template = None
    assert own_templates(tokenizer) == {}
    chat = ChatTemplate(None, tokenizer.special_tokens_map)
    assert chat.render(MESSAGES[:2]) == "System: Be brief.\nUser:  import os \nAssistant:"
    open_end = chat.render(MESSAGES, add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith("\nAssistant: import sys")
    assert (chat.is_fallback, chat.stop) == (True, ("\nUser:",))


def test_the_variables_that_a_template_reads_are_known(tokenizer: Any) -> None:
    """A variable that the template does not read can be refused."""
    chat = ChatTemplate(TEMPLATE, tokenizer.special_tokens_map)
    assert "thinking" in chat.variables
    assert "enable_thinking" not in chat.variables
    assert not chat.variables & RESERVED, "those that rendering gives are none of a request's"


def test_a_refusal_of_the_template_is_a_request_error(tokenizer: Any) -> None:
    """The error of a refused request quotes the template's own words."""
    chat = ChatTemplate(TEMPLATE, tokenizer.special_tokens_map)
    with pytest.raises(RequestError, match="refuses them: no such role: bard") as raised:
        chat.render([{"role": "bard", "content": "a"}])
    assert raised.value.param == "messages"
    with pytest.raises(RequestError, match="failed on them: TypeError"):
        ChatTemplate("{{ messages + 1 }}", tokenizer.special_tokens_map).render(MESSAGES)


def test_a_template_cannot_reach_python(tokenizer: Any) -> None:
    """A sandbox refuses the attempts, because templates come with checkpoints."""
    for hostile in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}",
    ):
        with pytest.raises(RequestError, match=r"SecurityError|refuses them"):
            ChatTemplate(hostile, tokenizer.special_tokens_map).render(MESSAGES)


def test_a_broken_template_is_a_sentence_at_start(tokenizer: Any) -> None:
    """The error of a broken template states the line."""
    with pytest.raises(ModelError, match="the chat template, line 2: "):
        ChatTemplate("a\n{% if %}", tokenizer.special_tokens_map)
    with pytest.raises(ModelError, match="the chat template, line 1: No filter named 'shouted'"):
        ChatTemplate("{{ messages | shouted }}", tokenizer.special_tokens_map)
    tokenizer.chat_template = {"default": "a", "rag": 5}
    with pytest.raises(ModelError, match="chat template 'rag' must be a text"):
        own_templates(tokenizer)
