"""Look-ups of n-grams, beside a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model_runtime.scheduling.drafts.ngram_index import NgramIndex

TOKENS = st.lists(st.integers(0, 2), max_size=60)


def longest_match(token_ids: list[int], context_ids: list[int]) -> int:
    """Return the length of the longest earlier match of the context's end, at least 3, else 0."""
    best = 0
    for end in range(3, len(token_ids)):
        length = 0
        while length < min(end, len(context_ids), 32):
            if token_ids[end - 1 - length] != context_ids[-1 - length]:
                break
            length += 1
        best = max(best, length)
    return best if best >= 3 else 0


@given(TOKENS, st.integers(1, 10))
def test_a_found_place_follows_the_end_of_the_text(token_ids: list[int], step: int) -> None:
    """The text grows between the look-ups, and no look-up finds the end itself."""
    index = NgramIndex()
    for end in range(0, len(token_ids) + 1, step):
        known = token_ids[:end]
        while not index.follow(known):
            pass
        at, length = index.find(known, known)
        assert (length == 0) == (longest_match(known, known) == 0)
        if length:
            assert known[at - length : at] == known[len(known) - length :]
            assert at < len(known)


@given(TOKENS, TOKENS)
def test_the_longest_of_few_places_is_found(token_ids: list[int], context_ids: list[int]) -> None:
    """With at most four places of an n-gram, none is longer than the one found."""
    index = NgramIndex()
    while not index.follow(token_ids):
        pass
    _, length = index.find(token_ids, context_ids)
    last = context_ids[-3:]
    places = [end for end in range(3, len(token_ids)) if token_ids[end - 3 : end] == last]
    if len(context_ids) >= 3 and len(places) <= 4:
        assert length == longest_match(token_ids, context_ids)


def test_a_long_prompt_is_indexed_in_parts() -> None:
    """No step waits for a whole prompt."""
    index, token_ids = NgramIndex(), list(range(2000))
    parts = 1
    while not index.follow(token_ids):
        parts += 1
    assert parts == 4
    assert index.find(token_ids, [7, 8, 9]) == (10, 3)
