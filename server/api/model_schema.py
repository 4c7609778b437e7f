"""Bodies of the routes about models and tokens."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from server.api.chat_schema import (
    Messages,
    ReasoningEffort,
    TemplateVariables,
    Tools,
    problems_of_opening,
    problems_of_results,
)
from server.api.fields.rope_schema import PositionsField
from server.api.generation_schema import TokenId
from server.api.strict_body import Body, FirstMistakes, is_none
from server.api.tools.tool_schema import ToolChoiceField, problems_of_choice


class TierEntry(Body):
    """One tier of a deployment."""

    max_len: int  # tokens
    factor: float
    rope_type: str
    positions: PositionsField | None = Field(None, exclude_if=is_none)


class ModelMeta(Body):
    """Lengths under llama.cpp's names, which agents read."""

    n_ctx: int  # the longest context
    n_ctx_train: int  # the length that the checkpoint was trained for


class ScalingEntry(Body):
    """The scaling of a deployment, and how its model writes calls."""

    original_max_position_embeddings: int
    rope_type: str
    policy: str
    tiers: list[TierEntry]
    allowed_rope_types: list[str]
    # Position methods that a request may name.
    allowed_positions: list[str] | None = Field(None, exclude_if=is_none)
    max_rope_factor: float
    aliases: list[str] | None = Field(None, exclude_if=is_none)  # other names of the deployment
    answer_reserve_tokens: int  # of a chat answer without max_tokens
    tool_format: str | None  # None: requests with tools are refused
    reasoning: str | None  # the marker that opens it; None: none is known


class Model(Body):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ropewalk"] = "ropewalk"
    max_model_len: int
    meta: ModelMeta
    ropewalk: ScalingEntry


class ModelList(Body):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


_OF_MESSAGES = (
    *("tools", "tool_choice", "reasoning_effort", "continue_final_message"),
    "chat_template_kwargs",
)


class TokenizeRequest(Body):
    """POST /tokenize: a text, or the messages of a chat."""

    # One of two fields is required, which a list of required fields cannot say.
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "text"}]})

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    # Default: as the route does that generates: added to a prompt, not to messages.
    add_special_tokens: bool | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the field that is missing, or that belongs to the other kind."""
        if self.prompt is None and self.messages is None:
            yield "prompt", "is missing, and so is `messages`"
        if self.prompt is not None and self.messages is not None:
            yield "messages", "and `prompt` exclude each other"
        if self.messages is None:
            for name in _OF_MESSAGES:
                if getattr(self, name):
                    yield name, "needs `messages`"
            return
        yield from problems_of_results(self.messages)
        yield from problems_of_choice(self.tools or (), self.tool_choice)
        yield from problems_of_opening(
            self.messages, opens=self.add_generation_prompt, continues=self.continue_final_message
        )

    @property
    def opens_answer(self) -> bool:
        """Return whether the prompt ends with the head of an assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class TokenizeResponse(Body):
    """How a text looks to the model."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=256)
    tokens: Annotated[list[TokenId], Field(fail_fast=True), FirstMistakes]
    skip_special_tokens: bool | None = None


class DetokenizeResponse(Body):
    """Tokens as text."""

    prompt: str


class TokenizerInfo(Body):
    """GET /tokenizer_info: what evaluation harnesses ask for."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str
