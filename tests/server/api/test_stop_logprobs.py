"""Under `stop`, tokens, logprobs and offsets end where the text ends, streamed or not."""

from typing import Any

import openai
import pytest

GREEDY: dict[str, Any] = {"model": "ropewalk-demo", "temperature": 0}
PROMPT = "import os\nimport sys\n\ndef "


@pytest.fixture(scope="module")
def text(openai_client: openai.OpenAI) -> str:
    """The answer without a stop string."""
    found = openai_client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40)
    return found.choices[0].text


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(("first", "end"), [(10, 13), (0, 4), (5, 6), (17, 25)])
def test_completions_end_everything_at_one_place(
    openai_client: openai.OpenAI, text: str, first: int, end: int, *, echo: bool
) -> None:
    """Each offset points into the text, and the tokens of the stop string are missing."""
    options: dict[str, Any] = {
        **GREEDY, "prompt": PROMPT, "max_tokens": 40, "logprobs": 1, "echo": echo,
    }  # fmt: skip
    whole = openai_client.completions.create(**options).choices[0]
    answer = openai_client.completions.create(**options, stop=text[first:end])
    choice = answer.choices[0]
    assert choice.text == (PROMPT if echo else "") + text[: text.index(text[first:end])]
    assert choice.logprobs is not None
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        found = getattr(choice.logprobs, name)
        assert found == getattr(whole.logprobs, name)[: len(found)]
    offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens
    assert offsets is not None
    assert tokens is not None
    assert all(offset < len(choice.text) for offset in offsets)
    # The logprobs have the whole text of a token that the stop string cuts in two.
    assert "".join(tokens[1 if echo else 0 :]).startswith(choice.text)
    assert not tokens or len("".join(tokens[1 if echo else 0 : -1])) < len(choice.text)
    assert answer.usage is not None
    num_shown = len(tokens) - (answer.usage.prompt_tokens if echo else 0)
    assert answer.usage.completion_tokens >= max(num_shown, 1)

    chunks = list(openai_client.completions.create(**options, stop=text[first:end], stream=True))
    sent, begun = "", 0
    for chunk in chunks:
        sent += chunk.choices[0].text
        piece = chunk.choices[0].logprobs
        assert piece is not None
        assert piece.text_offset is not None
        assert all(offset < len(sent) for offset in piece.text_offset)
        begun += len(piece.text_offset)
        assert begun == sum(offset < len(sent) for offset in offsets)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [each for chunk in chunks for each in getattr(chunk.choices[0].logprobs, name)]
        assert streamed == getattr(choice.logprobs, name)


def test_the_best_are_chosen_by_all_generated_tokens(openai_client: openai.OpenAI) -> None:
    """An answer that is empty because of its stop string is a candidate like any other."""
    found = openai_client.completions.create(
        model="ropewalk-demo", prompt=PROMPT, max_tokens=8, n=2, best_of=4, seed=1, logprobs=0,
        stop=["_", "e", "a", "i"],
    )  # fmt: skip
    assert len(found.choices) == 2
    for choice in found.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.text_offset or []) <= max(len(choice.text), 1)
