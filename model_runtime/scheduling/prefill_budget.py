"""How many prompt tokens a step may compute, so that those who wait for it do not wait long.

Everybody waits for a step to end: a sequence that decodes, for its next token; a request that has
just arrived, for its first. Most of a long step is its prefill, so its size follows what the last
steps took. Sizes depend on the clock, texts do not: rows of a chunk are the same in any chunk (to
the bit on a CPU, within rounding elsewhere).

Products take rows in blocks, and what does not fill one costs up to a third more a row
(packed_linear.py). So the rows of a step, decodes among them, are a power of two, the nearest: it
takes what it should but for a factor of up to 1.4.
"""

import math

_SMALLEST_SHARE = 64  # of the largest chunk: slower than this, long prompts would hardly move
_LARGEST_CHANGE = 2.0  # from one step to the next: a single step may be slow for another reason
_PATIENCE = 4  # targets that a step may take while only prompts wait for its end
_SMALLEST_BLOCK = 16  # rows


class PrefillBudget:
    """A number of prefill tokens that follows measured steps towards a target.

    `target_s`: seconds that a step with prefill should take; None: always `most` tokens.
    """

    def __init__(self, target_s: float | None, most: int) -> None:
        self._target_s = target_s
        self._most = most
        self._fewest = max(1, most // _SMALLEST_SHARE)
        # Nothing is known of the first step, and somebody may be waiting for it.
        self._tokens = float(most if target_s is None else min(most, 4 * self._fewest))
        self._limit = most  # after a step that memory was too small for

    def num_tokens(self, num_decodes: int = 0) -> int:
        """Prefill tokens of the next step beside so many decodes; more where there are none."""
        patience = 1 if num_decodes else _PATIENCE
        allowed = min(int(self._tokens * patience), self._most, self._limit)
        num_rows = allowed + num_decodes
        if self._target_s is None or num_rows < _SMALLEST_BLOCK:
            return allowed
        in_whole = (1 << round(math.log2(num_rows))) - num_decodes
        is_near = allowed <= 2 * in_whole and 2 * in_whole <= 3 * allowed
        return min(in_whole, self._most, self._limit) if is_near else allowed

    def note(self, num_prefill_tokens: int, seconds: float) -> None:
        """A step has computed so many prefill tokens, and taken so long in all."""
        self._limit = self._most
        # A step that had few to compute says little about how long many take.
        if self._target_s is not None and 2 * num_prefill_tokens >= int(self._tokens):
            self._set(num_prefill_tokens * self._target_s / max(seconds, 1e-9))

    def note_failure(self, num_prefill_tokens: int) -> None:
        """A step with so many was too much for the memory: half of them at the next attempt."""
        self._limit = max(1, num_prefill_tokens // 2)
        if self._target_s is not None:
            self._set(0)

    def _set(self, tokens: float) -> None:
        tokens = min(max(tokens, self._tokens / _LARGEST_CHANGE), self._tokens * _LARGEST_CHANGE)
        self._tokens = min(max(tokens, self._fewest), self._most)
