"""The chat template that a server uses: the operator's, or the tokenizer's own."""

from collections.abc import Callable, Mapping

from ropewalk.model_runtime.text.chat_template import RESERVED, ChatTemplate
from ropewalk.server.settings.load import ServeSettings, SettingsError, chat_template_text


def chat_template_of(
    settings: ServeSettings,
    own: Callable[[], str | None],
    special_tokens: Mapping[str, str] | None = None,
) -> ChatTemplate:
    """Return the operator's chat template, or the tokenizer's `own`.

    Raises ModelError or SettingsError.
    """
    for name in settings.allowed_chat_template_kwargs:
        if name in RESERVED:
            raise SettingsError(
                f"allowed_chat_template_kwargs: {name} is the rendering's own, remove it"
            )
    stated = chat_template_text(settings)
    text = own() if stated is None else stated
    return ChatTemplate(text, special_tokens, settings.chat_template_seconds)
