"""The prompt text made of messages, against transformers' own rendering."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from model_runtime.errors import ModelError, RequestError
from model_runtime.loading.model_config import EMBEDDED_MODEL
from model_runtime.text.chat_template import RESERVED, ChatTemplate

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
    chat = ChatTemplate(tokenizer)
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


def test_another_template_replaces_the_tokenizers(tokenizer: Any) -> None:
    """The operator states the other template."""
    tokenizer.chat_template = TEMPLATE
    chat = ChatTemplate(tokenizer, "{{ messages[0].content }}!")
    assert chat.render(MESSAGES) == "Be brief.!"


def test_without_a_template_messages_are_a_transcript(tokenizer: Any) -> None:
    """A base model continues such a text, and it stops before the user's next turn."""
    tokenizer.chat_template = None
    chat = ChatTemplate(tokenizer)
    assert chat.render(MESSAGES[:2]) == "System: Be brief.\nUser:  import os \nAssistant:"
    open_end = chat.render(MESSAGES, add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith("\nAssistant: import sys")
    assert (chat.is_fallback, chat.stop) == (True, ("\nUser:",))


def test_the_variables_that_a_template_reads_are_known(tokenizer: Any) -> None:
    """A variable that the template does not read can be refused."""
    chat = ChatTemplate(tokenizer, TEMPLATE)
    assert "thinking" in chat.variables
    assert "enable_thinking" not in chat.variables
    assert not chat.variables & RESERVED, "those that rendering gives are none of a request's"


def test_a_refusal_of_the_template_is_a_request_error(tokenizer: Any) -> None:
    """The error of a refused request quotes the template's own words."""
    chat = ChatTemplate(tokenizer, TEMPLATE)
    with pytest.raises(RequestError, match="refuses them: no such role: bard") as raised:
        chat.render([{"role": "bard", "content": "a"}])
    assert raised.value.param == "messages"
    with pytest.raises(RequestError, match="failed on them: TypeError"):
        ChatTemplate(tokenizer, "{{ messages + 1 }}").render(MESSAGES)


def test_a_template_cannot_reach_python(tokenizer: Any) -> None:
    """A sandbox refuses the attempts, because templates come with checkpoints."""
    for hostile in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}",
    ):
        with pytest.raises(RequestError, match=r"SecurityError|refuses them"):
            ChatTemplate(tokenizer, hostile).render(MESSAGES)


def test_a_broken_template_is_a_sentence_at_start(tokenizer: Any) -> None:
    """The error of a broken template states the line."""
    with pytest.raises(ModelError, match="the chat template, line 2: "):
        ChatTemplate(tokenizer, "a\n{% if %}")
    with pytest.raises(ModelError, match="the chat template, line 1: No filter named 'shouted'"):
        ChatTemplate(tokenizer, "{{ messages | shouted }}")
    tokenizer.chat_template = {"tool_use": "a", "rag": "b"}
    with pytest.raises(ModelError, match="chat templates"):
        ChatTemplate(tokenizer)
