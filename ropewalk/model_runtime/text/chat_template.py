"""Render messages into a model's prompt with the tokenizer's own Jinja template.

The text is that of transformers' `apply_chat_template`. A checkpoint's template is compiled and
rendered in another process, in a sandbox and with a limit of time (`template_renderer.py`). The
transcript of a tokenizer without a template is ours, and is rendered here.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache, cached_property, partial
from typing import Any

from jinja2 import Template

from ropewalk.model_runtime.errors import ModelError, RequestError, TemplateLimitError
from ropewalk.model_runtime.text.template_process import environment
from ropewalk.model_runtime.text.template_renderer import (
    TemplateExcessError,
    TemplateProblemError,
    TemplateRefusedError,
    template_renderer,
)

# Names of templates, as transformers knows them.
DEFAULT, TOOL_USE, RAG = "default", "tool_use", "rag"
# For a tokenizer without a template: a transcript that a base model continues.
FALLBACK_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Variables that the renderer itself passes to a template; a request cannot set them.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "conversation", "tokenize", "bos_token", "eos_token", "pad_token"}
    | {"unk_token", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
)
_FALLBACK_STOP = "\nUser:"  # without it, a base model would also write the user's next message
_FALLBACK_VARIABLES = frozenset({"messages", "add_generation_prompt"})
# Behind a last message that is continued. Its space tells whether the template strips messages.
_MARK = "<the prompt ends here> "
_PLAIN_CONTENTS = ("Hello.", "Plain words.")  # of two conversations, whose prompts must differ
# Names that a message may have for its reasoning; templates read the first, or the second.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A tokenizer's template, its override, or the fallback."""

    def __init__(
        self,
        text: str | None,
        special_tokens: Mapping[str, str] | None = None,
        others: Mapping[str, str] | None = None,
    ) -> None:
        """`text`: None for the fallback. `special_tokens`: by their names in templates.

        `others` are the tokenizer's named templates beside this one. Raises ModelError for a
        template that cannot be compiled within the limit.
        """
        self._special_tokens = special_tokens or {}
        self._others = {name: self._named(name, each) for name, each in (others or {}).items()}
        self.is_fallback = text is None
        self.stop: tuple[str, ...] = (_FALLBACK_STOP,) if self.is_fallback else ()
        self.text = FALLBACK_TEMPLATE if text is None else text
        names = _FALLBACK_VARIABLES if text is None else self._compile()
        self.variables = names - RESERVED
        self.reads_documents = "documents" in names

    def _named(self, name: str, text: str) -> "ChatTemplate":
        try:
            return ChatTemplate(text, self._special_tokens)
        except ModelError as error:
            raise ModelError(f"{error} (the one named {name!a})") from error

    @property
    def texts(self) -> dict[str, str]:
        return {DEFAULT: self.text, **{name: each.text for name, each in self._others.items()}}

    def picked(self, *, has_tools: bool, has_documents: bool = False) -> "ChatTemplate":
        """Return the template for a conversation, among this one and the named ones.

        As transformers, which takes `tool_use` for tools. It leaves `rag` to its caller: here it is
        taken for documents that would be lost otherwise.
        """
        loses_documents = has_documents and not self.reads_documents
        name = TOOL_USE if has_tools else RAG if loses_documents else DEFAULT
        return self._others.get(name, self)

    def _compile(self) -> frozenset[str]:
        try:
            return template_renderer().compile(self.text)
        except TemplateRefusedError as error:
            raise ModelError(f"the chat template, {error}") from error
        except TemplateExcessError as error:
            raise ModelError(f"the chat template {error} to compile") from error
        except TemplateProblemError as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    def submit(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> "Future[str]":
        """Render on the templates' own thread; the options and errors are those of `render`."""
        return template_renderer().submit(partial(self.render, messages, **options))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render the prompt as text, including special tokens, with this template.

        `tools` are functions in OpenAI's shape.

        Raises RequestError with the template's own message if it rejects the messages, or
        TemplateLimitError if it exceeds its time on them.
        """
        chat = [_for_template(message) for message in messages]
        last = chat[-1]["content"] if continue_final_message else ""
        if continue_final_message:
            if not last.strip():
                # The prompt would be cut inside the header of the message.
                raise _not_continued("needs a last message that says something")
            chat[-1]["content"] = last + _MARK
        text = self._rendered(
            {
                **self._special_tokens,
                **(variables or {}),
                "messages": chat,
                "tools": [*tools] or None,
                "documents": None if documents is None else [*documents],
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text, last) if continue_final_message else text

    @cached_property
    def plain_problem(self) -> str | None:
        """Return a sentence if the template cannot write a plain conversation, else None."""
        if self.is_fallback:
            return None
        texts = set()
        for content in _PLAIN_CONTENTS:
            try:
                texts.add(self.render([{"role": "user", "content": content}]))
            except RequestError as error:
                why = " ".join(str(error.__cause__).split())  # a line break would forge a line
                return f"the chat template fails on a plain conversation: {why}"
        if len(texts) == 1:
            return "the chat template writes the same prompt for different messages"
        return None

    def _rendered(self, values: Mapping[str, Any]) -> str:
        """Render the template with all its variables. Raises as `render`."""
        if self.is_fallback:
            return _fallback().render(values)
        try:
            return template_renderer().render(self.text, values)
        except TemplateRefusedError as error:
            raise RequestError(
                f"`messages`: the model's chat template refuses them: {error}", param="messages"
            ) from error
        except TemplateExcessError as error:
            raise TemplateLimitError(str(error)) from error
        except TemplateProblemError as error:
            raise RequestError(
                f"`messages`: the model's chat template failed on them: {error}", param="messages"
            ) from error


@cache
def _fallback() -> Template:
    return environment().from_string(FALLBACK_TEMPLATE)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it: without nulls, its reasoning under all their names."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING_NAMES if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _cut_at_mark(text: str, last: str) -> str:
    """Return a rendered prompt up to the mark behind its last message. Raises RequestError."""
    mark = _MARK.strip()
    at = text.rfind(mark)
    if at < 0 or last.strip() not in text:
        raise _not_continued("needs a chat template that writes the last message as it is")
    head = text[:at]
    # A template that strips a message strips the end of this one, too.
    return head if text.startswith(_MARK, at) else head.rstrip()


def _not_continued(problem: str) -> RequestError:
    return RequestError(f"`continue_final_message` {problem}", param="continue_final_message")


def own_templates(tokenizer: Any) -> dict[str, str]:
    """Return the templates of a tokenizer of transformers by their names. Raises ModelError."""
    found = tokenizer.chat_template
    if found is None:
        return {}
    templates = dict(found) if isinstance(found, Mapping) else {DEFAULT: found}
    for name, text in templates.items():
        if not isinstance(text, str):
            raise ModelError(f"the tokenizer's chat template {name!a} must be a text")
    return templates
