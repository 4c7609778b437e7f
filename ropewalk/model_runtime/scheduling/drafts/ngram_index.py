"""Find the end of a text in what stands before it: its n-grams, by their newest places.

Appending a token takes constant time, and so does a look-up. The tokens behind the longest match
are a draft (prompt lookup decoding: Saxena 2023; `ngram` of vLLM and llama.cpp).
"""

from collections.abc import Sequence

_N = 3  # tokens of an n-gram; shorter ones match by chance
_BITS = 21  # of a token id in a key
_MOST_MATCH = 32  # tokens compared backwards; a longer match says no more
_MOST_PLACES = 4  # of an n-gram that are compared, newest first
_AT_ONCE = 512  # tokens indexed by one call, so that no step waits for a long prompt
_MOST_INDEXED = 1 << 16  # newest tokens of a text when it is first seen; about 100 bytes each


class NgramIndex:
    """The places of each n-gram in a list of tokens that only grows."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # n-gram -> index of the token after it
        self._before: dict[int, int] = {}  # that index -> the one of the same n-gram before it
        self._end = 0  # n-grams that end before this index are known

    def follow(self, token_ids: Sequence[int]) -> bool:
        """Index more of the tokens; return whether all are known.

        The last n-gram has no token after it, so it is not a place yet.
        """
        if not self._end:
            self._end = max(_N, len(token_ids) - _MOST_INDEXED)
        newest, before = self._newest, self._before
        begin, end = self._end, min(len(token_ids), self._end + _AT_ONCE)
        for at in range(begin, end):
            key = _key(token_ids, at)
            if key in newest:
                before[at] = newest[key]
            newest[key] = at
        self._end = max(begin, end)
        return self._end >= len(token_ids)

    def find(self, token_ids: Sequence[int], context_ids: Sequence[int]) -> tuple[int, int]:
        """Return the longest match of a context's end: the index after it, and its length.

        `token_ids`: the indexed tokens. The newest of equal matches is returned. Without a match
        the length is 0.
        """
        if len(context_ids) < _N:
            return 0, 0
        at = self._newest.get(_key(context_ids, len(context_ids)))
        found, longest = 0, 0
        for _ in range(_MOST_PLACES):
            if at is None:
                break
            length = _match_length(token_ids, at, context_ids)
            if length > longest:
                found, longest = at, length
            at = self._before.get(at)
        return found, longest


def _key(token_ids: Sequence[int], end: int) -> int:
    """Return the n-gram before an index as one number."""
    first, second, third = token_ids[end - _N : end]
    return (first << 2 * _BITS) | (second << _BITS) | third


def _match_length(token_ids: Sequence[int], end: int, context_ids: Sequence[int]) -> int:
    """Return how many tokens before `end` are those at the end of the context, an n-gram or more.

    The n-gram before `end` is that at the end of the context.
    """
    most = min(end, len(context_ids), _MOST_MATCH)
    length = _N
    while length < most and token_ids[end - 1 - length] == context_ids[-1 - length]:
        length += 1
    return length
