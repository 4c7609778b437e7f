"""Words that an answer must not contain, as sequences of tokens (vLLM's `bad_words`).

Only the last token of a word is barred, and only where the answer ends with the others.
"""

from collections.abc import Sequence

from ropewalk.model_runtime.request import SamplingParams

# Added to the logit of a token that must not come. Not minus infinity: if a grammar allows no
# other token, then this one has to come.
BARRED = -1e4


def spellings(word: str) -> tuple[str, ...]:
    """Return a word at the start of a text and after a space; one of whitespace is itself."""
    start = word.lstrip()
    return (start, f" {start}") if start else (word,)


def single_tokens(params: SamplingParams) -> tuple[int, ...]:
    """Return the words of one token, which are barred at every step."""
    return tuple(word[0] for word in params.bad_words if len(word) == 1)


def num_before(params: SamplingParams) -> int:
    """Return how many last tokens of the answer so far the barred tokens depend on."""
    return max(map(len, params.bad_words), default=1) - 1


def barred_after(params: SamplingParams, answer_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that would complete a word of several tokens.

    `answer_ids` are the last ones of the answer so far, at least `num_before`.
    """
    return tuple(
        dict.fromkeys(
            word[-1]
            for word in params.bad_words
            if len(word) > 1 and tuple(answer_ids[1 - len(word) :]) == word[:-1]
        )
    )
