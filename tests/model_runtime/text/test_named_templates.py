"""Tokenizers with several chat templates, against transformers' own choice among them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_tokenizer import read_tokenizer
from ropewalk.model_runtime.text.chat_template import ChatTemplate, own_templates
from ropewalk.model_runtime.text.tools.find_format import find_formats
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.planning.template_of import chat_template_of
from tests.checkpoints.gguf_files import byte_vocabulary, write_file
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.tool_templates import HERMES, NO_TOOLS

NAMED = {
    "default": NO_TOOLS,
    "tool_use": HERMES,
    "rag": "{% for d in documents %}{{ d | tojson }}{% endfor %}" + NO_TOOLS,
}
CHAT = [{"role": "user", "content": "Hello."}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
DOCUMENTS = [{"title": "é", "text": "a"}, {"text": "b", "pages": [1, None]}]


def written(folder: Path, how: str) -> PreTrainedTokenizerFast:
    """A folder's tokenizer under transformers, saved with its templates in one of three ways."""
    fast = byte_tokenizer_fast()
    fast.chat_template = NAMED
    fast.save_pretrained(folder, save_jinja_files=how != "a list")
    if how == "files beside a list":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": "default", "template": "a"}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    return found


def template_of(templates: Mapping[str, str]) -> ChatTemplate:
    """What a server makes of a tokenizer's templates."""
    return chat_template_of(load_settings({}), lambda: templates)


def assert_renders_as(tokenizer: Any, template: ChatTemplate) -> None:
    """Compare plain chats, chats with tools, and chats with documents."""
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template(CHAT, **options)
    assert template.picked(has_tools=False).render(CHAT) == expected
    expected = tokenizer.apply_chat_template(CHAT, tools=TOOLS, **options)
    assert "<tools>" in expected
    assert template.picked(has_tools=True).render(CHAT, tools=TOOLS) == expected
    expected = tokenizer.apply_chat_template(
        CHAT, documents=DOCUMENTS, chat_template="rag", **options
    )
    picked = template.picked(has_tools=False, has_documents=True)
    assert picked.render(CHAT, documents=DOCUMENTS) == expected


@pytest.mark.parametrize("how", ["a list", "files", "files beside a list"])
def test_a_folders_templates_are_picked_as_in_transformers(how: str, tmp_path: Path) -> None:
    """Files replace the templates of tokenizer_config.json."""
    tokenizer = written(tmp_path, how)
    assert own_templates(tokenizer) == NAMED
    assert_renders_as(tokenizer, template_of(own_templates(tokenizer)))


def test_a_gguf_file_has_named_templates(tmp_path: Path) -> None:
    """Their keys are those of llama.cpp's converter."""
    key = "tokenizer.chat_template"
    names = {f"{key}.{name}": text for name, text in NAMED.items() if name != "default"}
    metadata = {
        **byte_vocabulary(300),
        "general.architecture": "llama",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        key: NAMED["default"],
        **names,
    }
    found = read_tokenizer(read_gguf(write_file(tmp_path / "t.gguf", metadata, {})))
    tokenizer = byte_tokenizer_fast()
    tokenizer.chat_template = NAMED
    assert_renders_as(tokenizer, template_of(found.chat_templates))


def test_the_format_of_calls_is_that_of_the_template_for_tools() -> None:
    """The default template alone would need the server's own instructions."""
    found = find_formats(template_of(NAMED), {}).tools
    assert found is not None
    assert (found.name, found.in_template) == ("hermes", True)
    thinks = {**NAMED, "tool_use": HERMES + "{# </think> #}"}
    assert find_formats(template_of(thinks), {}).reasoning is not None


def test_documents_stay_with_a_default_template_that_reads_them() -> None:
    """As in transformers; a template for tools is never replaced by `rag`."""
    both = {**NAMED, "default": "{{ documents | length }}"}
    picked = template_of(both).picked(has_tools=False, has_documents=True)
    assert picked.render(CHAT, documents=DOCUMENTS) == "2"
    assert not template_of(NAMED).picked(has_tools=True, has_documents=True).reads_documents


def test_templates_without_a_default_are_a_sentence_at_start(tmp_path: Path) -> None:
    """transformers, too, has no template for a plain chat then."""
    tokenizer = written(tmp_path, "files")
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no default specified"):
        tokenizer.apply_chat_template(CHAT)
    with pytest.raises(ModelError, match="has the chat templates rag, tool_use and none named"):
        template_of(own_templates(tokenizer))


def test_a_broken_template_is_told_by_its_name() -> None:
    """Which of them is wrong would else be a search."""
    with pytest.raises(ModelError, match=r"line 1: .*\(the one named 'rag'\)"):
        template_of({**NAMED, "rag": "{% if %}"})
