"""Bodies of the routes about models and tokens."""

from typing import Annotated, Literal

from pydantic import Field

from server.api.generation_schema import TokenId
from server.api.strict_body import Body, FirstMistakes


class Model(Body):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["ropewalk"] = "ropewalk"
    max_model_len: int


class ModelList(Body):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeRequest(Body):
    """POST /tokenize."""

    model: str | None = Field(None, max_length=256)
    prompt: str
    add_special_tokens: bool = True


class TokenizeResponse(Body):
    """How a text looks to the model."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=256)
    tokens: Annotated[list[TokenId], Field(fail_fast=True), FirstMistakes]
    skip_special_tokens: bool = False


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
