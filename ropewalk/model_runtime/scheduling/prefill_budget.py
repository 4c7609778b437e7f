"""The number of prefill tokens that a step may compute, so that a step stays short.

Every sequence waits for a step to end. A decoding sequence waits for its next token, and a new
request for its first. Prefill takes most of a long step, so its size follows the duration of the
last steps. The sizes depend on the clock, but the generated text does not. A row has the same
result in any chunk (to the bit on a CPU, within rounding elsewhere).

Matrix products process rows in blocks. A block that is not full costs up to a third more per row
(packed_linear.py). The rows of a step, decodes included, are therefore the nearest power of two.
The duration of a step can differ from its target by a factor of up to 1.4.

A model whose decode step takes long cannot pause for a tenth of a second only. A step beside
decodes may then take a multiple of one without prefill (`StepCost`), so that prompts progress and
the first tokens of a batch do not wait behind the next tokens of its earlier requests.
"""

import math

from ropewalk.model_runtime.scheduling.step_cost import StepCost

_SMALLEST_SHARE = 64  # of the largest chunk; with a smaller one, long prompts would hardly progress
_LARGEST_CHANGE = 2.0  # factor between two steps, because one step may be slow for another reason
_PATIENCE = 4  # a step without decodes may take this many times the target
_DECODE_STEPS = 4  # that a step with decodes and prefill may take, if the target follows them
_SMALLEST_BLOCK = 16  # rows


class PrefillBudget:
    """A number of prefill tokens that follows measured steps towards a target.

    `target_s`: seconds that a step with prefill should take; None: always `most` tokens.
    `follows_decodes`: a step beside decodes may take four steps without prefill, if that is longer.
    """

    def __init__(self, target_s: float | None, most: int, *, follows_decodes: bool = False) -> None:
        self._target_s = target_s
        self._most = most
        self._fewest = max(1, most // _SMALLEST_SHARE)
        # Tokens that take the target's time; it may be fewer than a step is ever given.
        # The first step has no measurement, and a request may be waiting for it.
        self._tokens = float(most if target_s is None else min(most, 4 * self._fewest))
        self._limit = most  # lower after a step that ran out of memory
        self._decode_cost = StepCost() if follows_decodes else None
        self._has_decoded = False  # the first step without prefill has costs that no other has

    def num_tokens(self, num_decodes: int = 0) -> int:
        """Return the prefill tokens of the next step; more if it has no decodes."""
        tokens = max(self._tokens, self._fewest) * (1 if num_decodes else _PATIENCE)
        # A prompt alone gets no fewer than beside one decode.
        tokens = max(tokens, self._tokens * self._patience(max(num_decodes, 1)))
        allowed = min(int(tokens), self._most, self._limit)
        num_rows = allowed + num_decodes
        if self._target_s is None or num_rows < _SMALLEST_BLOCK:
            return allowed
        in_whole = (1 << round(math.log2(num_rows))) - num_decodes
        is_near = allowed <= 2 * in_whole and 2 * in_whole <= 3 * allowed
        return min(in_whole, self._most, self._limit) if is_near else allowed

    def _patience(self, num_decodes: int) -> float:
        """Return how many times the target a step beside so many decodes may take."""
        cost = self._decode_cost
        if self._target_s is None or cost is None or not cost.is_known:
            return 1
        return max(1, _DECODE_STEPS * cost.line(num_decodes)[0] / self._target_s)

    def note(self, num_prefill_tokens: int, seconds: float, num_decode_rows: int = 0) -> None:
        """Record the prefill tokens of a step, the rows of its decodes, and its duration."""
        self._limit = self._most
        if self._decode_cost is not None and num_decode_rows and not num_prefill_tokens:
            if self._has_decoded:
                self._decode_cost.note(num_decode_rows, seconds)
            self._has_decoded = True
        # A step with few prefill tokens does not predict the duration of many.
        least = int(max(self._tokens, self._fewest))
        if self._target_s is not None and 2 * num_prefill_tokens >= least:
            self._set(num_prefill_tokens * self._target_s / max(seconds, 1e-9))

    def note_failure(self, num_prefill_tokens: int) -> None:
        """Record that a step ran out of memory, and halve its prefill tokens for the retry."""
        self._limit = max(1, num_prefill_tokens // 2)
        if self._target_s is not None:
            self._set(0)

    def _set(self, tokens: float) -> None:
        tokens = min(max(tokens, self._tokens / _LARGEST_CHANGE), self._tokens * _LARGEST_CHANGE)
        self._tokens = min(max(tokens, 1.0), self._most)
