"""Find the chat template that a server uses, and its formats of tool calls and reasoning."""

from collections.abc import Callable, Mapping

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.text.chat_template import DEFAULT, RESERVED, ChatTemplate
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.model_runtime.text.tools.find_format import ChatFormats, find_formats
from ropewalk.server.settings.load import ServeSettings, SettingsError, chat_template_text

Chat = tuple[ChatTemplate, ChatFormats]


def chat_template_of(
    settings: ServeSettings,
    own: Callable[[], Mapping[str, str]],
    special_tokens: Mapping[str, str] | None = None,
) -> ChatTemplate:
    """Return the operator's chat template, or the tokenizer's `own` by their names.

    Raises ModelError or SettingsError.
    """
    for name in settings.allowed_chat_template_kwargs:
        if name in RESERVED:
            raise SettingsError(
                f"allowed_chat_template_kwargs: {name} is the rendering's own, remove it"
            )
    stated = chat_template_text(settings)
    if stated is not None:
        return ChatTemplate(stated, special_tokens)
    others = dict(own())
    if others and DEFAULT not in others:
        raise ModelError(
            f"the tokenizer has the chat templates {', '.join(sorted(others))} and none named "
            f"{DEFAULT}, name a file (chat_template)"
        )
    return ChatTemplate(others.pop(DEFAULT, None), special_tokens, others)


def chat_of(settings: ServeSettings, tokenizer: Tokenizer, vocab_size: int) -> Chat:
    """Return the chat template and its formats of calls. Raises ModelError or SettingsError."""
    template = chat_template_of(settings, tokenizer.own_templates, tokenizer.special_tokens_map)
    # A marker whose token the model has no row for can only come as text.
    special = {text: each for text, each in tokenizer.special_ids.items() if each < vocab_size}
    return template, find_formats(template, special, settings.tool_format)
