"""Logprobs in the shapes of OpenAI and vLLM."""

from collections.abc import Callable
from typing import Self

from pydantic import Field

from ropewalk.model_runtime.request import TokenLogprob
from ropewalk.server.api.strict_body import Body


class Logprobs(Body):
    """The logprobs of a completion, in OpenAI's classic shape."""

    tokens: list[str] = Field(examples=[[" there"]])
    """The tokens. One that is part of a character is written as `bytes:\\xe2`."""
    token_logprobs: list[float | None] = Field(examples=[[-0.5]])
    """The logprob of each token. The first token of an echoed prompt has null. Minus infinity is
    written as -9999."""
    top_logprobs: list[dict[str, float] | None] = Field(
        examples=[[{" there": -0.5, " here": -2.0}]]
    )
    """The likeliest tokens at each place, with their logprobs."""
    text_offset: list[int] = Field(examples=[[0]])
    """The place of each token in the text, in characters."""


class TopLogprob(Body):
    """One token that might have been chosen."""

    token: str = Field(examples=[" there"])
    """The token's text."""
    logprob: float = Field(examples=[-0.5])
    """Its logprob. Minus infinity is written as -9999."""
    bytes: list[int] = Field(examples=[[32, 116, 104, 101, 114, 101]])
    """Its bytes in UTF-8."""


class TokenLogprobs(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]
    """The likeliest tokens, as many as `top_logprobs`."""


class ChatLogprobs(Body):
    """The logprobs of a message, in OpenAI's shape."""

    content: list[TokenLogprobs]
    """An entry for each token."""
    refusal: None = Field(None, examples=[None])
    """Null, because no answer is a refusal."""


class PromptLogprob(Body):
    """A token of the prompt, or one that might have stood there, as vLLM tells it."""

    logprob: float = Field(examples=[-0.5])
    """Its logprob. Minus infinity is written as -9999."""
    rank: int | None = Field(examples=[1])
    """Its place among all tokens, from 1. Null if it is not among the alternatives that the server
    looks at."""
    decoded_token: str = Field(examples=["Once"])
    """The token's text."""

    @classmethod
    def by_token(
        cls, scored: TokenLogprob, num_top: int, told: Callable[[int, float, int | None], Self]
    ) -> dict[str, Self]:
        """Return the token and the likeliest ones by their ids in decimal."""
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(scored.top, 1)}
        own = (scored.token_id, scored.logprob)
        return {
            str(token_id): told(token_id, logprob, ranks.get(token_id))
            for token_id, logprob in (own, *scored.top[:num_top])
        }


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # None: the first token has none
# The example of such a field.
PROMPT_LOGPROBS = [None, {"50": {"logprob": -0.5, "rank": 1, "decoded_token": "Once"}}]
