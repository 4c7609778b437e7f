"""The number of prefill tokens that a step may compute, so that a step stays short.

Every sequence waits for a step to end. A decoding sequence waits for its next token, and a new
request for its first. Prefill takes most of a long step, so its size follows the duration of the
last steps. The sizes depend on the clock, but the generated text does not. A row has the same
result in any chunk (to the bit on a CPU, within rounding elsewhere).

Matrix products process rows in blocks. A block that is not full costs up to a third more per row
(packed_linear.py). The rows of a step, decodes included, are therefore the nearest power of two.
The duration of a step can differ from its target by a factor of up to 1.4.
"""

import math

_SMALLEST_SHARE = 64  # of the largest chunk; with a smaller one, long prompts would hardly progress
_LARGEST_CHANGE = 2.0  # factor between two steps, because one step may be slow for another reason
_PATIENCE = 4  # a step without decodes may take this many times the target
_SMALLEST_BLOCK = 16  # rows


class PrefillBudget:
    """A number of prefill tokens that follows measured steps towards a target.

    `target_s`: seconds that a step with prefill should take; None: always `most` tokens.
    """

    def __init__(self, target_s: float | None, most: int) -> None:
        self._target_s = target_s
        self._most = most
        self._fewest = max(1, most // _SMALLEST_SHARE)
        # The first step has no measurement, and a request may be waiting for it.
        self._tokens = float(most if target_s is None else min(most, 4 * self._fewest))
        self._limit = most  # lower after a step that ran out of memory

    def num_tokens(self, num_decodes: int = 0) -> int:
        """Return the prefill tokens of the next step; more if it has no decodes."""
        patience = 1 if num_decodes else _PATIENCE
        allowed = min(int(self._tokens * patience), self._most, self._limit)
        num_rows = allowed + num_decodes
        if self._target_s is None or num_rows < _SMALLEST_BLOCK:
            return allowed
        in_whole = (1 << round(math.log2(num_rows))) - num_decodes
        is_near = allowed <= 2 * in_whole and 2 * in_whole <= 3 * allowed
        return min(in_whole, self._most, self._limit) if is_near else allowed

    def note(self, num_prefill_tokens: int, seconds: float) -> None:
        """Record the prefill tokens of a step and its duration."""
        self._limit = self._most
        # A step with few prefill tokens does not predict the duration of many.
        if self._target_s is not None and 2 * num_prefill_tokens >= int(self._tokens):
            self._set(num_prefill_tokens * self._target_s / max(seconds, 1e-9))

    def note_failure(self, num_prefill_tokens: int) -> None:
        """Record that a step ran out of memory, and halve its prefill tokens for the retry."""
        self._limit = max(1, num_prefill_tokens // 2)
        if self._target_s is not None:
            self._set(0)

    def _set(self, tokens: float) -> None:
        tokens = min(max(tokens, self._tokens / _LARGEST_CHANGE), self._tokens * _LARGEST_CHANGE)
        self._tokens = min(max(tokens, self._fewest), self._most)
