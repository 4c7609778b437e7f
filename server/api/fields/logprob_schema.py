"""Logprobs in answers: OpenAI's two shapes, and vLLM's of a prompt."""

from collections.abc import Callable
from typing import Self

from model_runtime.request import TokenLogprob
from server.api.strict_body import Body


class Logprobs(Body):
    """The classic completions shape."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Body):
    """One token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    """OpenAI's chat shape."""

    content: list[TokenLogprobs]
    refusal: None = None


class PromptLogprob(Body):
    """A token of the prompt, or one that might have stood there, as vLLM tells it."""

    logprob: float
    rank: int | None  # among all tokens, from 1; None: behind the reported ones
    decoded_token: str

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
