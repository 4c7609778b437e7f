"""Render messages into a model's prompt with the tokenizer's own Jinja template.

transformers renders it in an immutable sandbox, because a checkpoint's template is not trusted.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model_runtime.errors import ModelError, RequestError

# For a tokenizer without a template: a transcript that a base model continues.
FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# transformers' tag around assistant text; it is for training, and Jinja does not know it.
_GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
# Variables that the renderer itself passes to a template; a request cannot set them.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "conversation", "tokenize", "bos_token", "eos_token", "pad_token"}
    | {"unk_token", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
)
MAX_TEMPLATE_STOPS = 1
_FALLBACK_STOP = "\nUser:"  # without it, a base model would also write the user's next message


class ChatTemplate:
    """A tokenizer's template, its override, or the fallback."""

    def __init__(self, tokenizer: Any, override: str | None = None) -> None:
        """`tokenizer` is transformers'. Raises ModelError for a template that cannot be parsed."""
        self._tokenizer = tokenizer
        own = _own_template(tokenizer) if override is None else override
        self.is_fallback = own is None
        self.stop: tuple[str, ...] = (_FALLBACK_STOP,) if self.is_fallback else ()
        self.text = FALLBACK_TEMPLATE if own is None else own
        try:
            # Parsed only for its names; transformers compiles and renders it.
            environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
            parsed = environment.parse(_GENERATION_TAG.sub("", self.text))
            self.variables = frozenset(meta.find_undeclared_variables(parsed)) - RESERVED
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render the prompt as text, including special tokens.

        `tools` are functions in OpenAI's shape.

        Raises RequestError with the template's own message if it rejects the messages.
        """
        if continue_final_message and not messages[-1]["content"].strip():
            # transformers would cut the prompt inside the header of the message.
            raise RequestError(
                "`continue_final_message` needs a last message that says something",
                param="continue_final_message",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.text,
                tools=[*tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(variables or {}),
            )
        except TemplateError as error:
            raise RequestError(
                f"`messages`: the model's chat template refuses them: {error}", param="messages"
            ) from error
        except Exception as error:  # an expression in a template may raise any error
            raise RequestError(
                "`messages`: the model's chat template failed on them: "
                f"{type(error).__name__}: {error}",
                param="messages",
            ) from error
        return text


def _own_template(tokenizer: Any) -> str | None:
    if tokenizer.chat_template is None:
        return None
    try:
        found: str = tokenizer.get_chat_template()
    except ValueError as error:  # several named templates without a default
        raise ModelError(f"the tokenizer's chat templates: {error}") from error
    return found
