"""Plan the prefill of a step: which waiting sequences start, and which prompt tokens are computed.

Among prompts of one priority, those with the fewest uncomputed tokens go first, so a short prompt
does not wait for a long one. A prompt that waits for pages of another lends it its rank. A quarter
of the budget is reserved for the oldest prompt of the first priority, so the longest prompt
completes.
"""

import math
from collections.abc import Iterable

from ropewalk.model_runtime.scheduling.drafts.draft_lengths import StepCost
from ropewalk.model_runtime.scheduling.prefix_cache import Key
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.model_runtime.scheduling.step_builder import StepBuilder
from ropewalk.model_runtime.scheduling.step_plan import Chunk

_RESERVED_FOR_OLDEST = 0.25  # of a step's prefill, even if shorter prompts wait


class _InFlight:
    """The pages that running sequences compute, and the sequence that has each one first."""

    def __init__(self, step: StepBuilder) -> None:
        self._step = step
        self._first: dict[Key | None, Sequence] = {}

    def note(self, running: Iterable[Sequence]) -> None:
        """Add the pages that these sequences have yet to compute."""
        for each in running:
            for key in self._step.pages.keys_in_flight(each):
                first = self._first.get(key)
                if first is None or _order(each) < _order(first):
                    self._first[key] = each

    def holds_up(self, sequence: Sequence, keys: Iterable[Key | None]) -> bool:
        """Return whether a sequence waits until one of these pages, the best first, is shared.

        It waits for none that is computed under a later priority, because prompts between the two
        could keep that page waiting without end.
        """
        for key in keys:
            first = self._first.get(key)
            if first is not None and first.request.priority <= sequence.request.priority:
                sequence.waits_for = key
                self._step.lend_rank(sequence, first)
                return True
        return False


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.num_uncomputed


def start_waiting(step: StepBuilder, max_num_seqs: int) -> bool:
    """Start waiting sequences in the order of their ranks, until one does not fit the free pages.

    Returns True if only the end of another sequence can let one more start.
    """
    queues, pages = step.queues, step.pages
    # No sequence waits for a page that another one computes, or that the tier reads.
    are_all_ready = not pages.num_read_for
    in_flight = _InFlight(step)
    in_flight.note(queues.running)
    for sequence in [each for each in queues.waiting if not pages.is_read_for(each)]:
        if len(queues.running) + pages.num_read_for >= max_num_seqs or not pages.has_free_slot:
            return are_all_ready
        if in_flight.holds_up(sequence, [sequence.waits_for]):
            are_all_ready = False
            continue
        step.change_tier(sequence)  # if it was preempted just before
        keys = pages.reusable_keys(sequence)
        found = pages.reusable_pages(keys)
        priority = sequence.request.priority
        earlier = (each for each in queues.running if each.request.priority <= priority)
        num_found = pages.num_per_group(found)
        in_flight.note(pages.plan_junction(earlier, keys, num_found))
        if in_flight.holds_up(sequence, pages.awaited(keys[num_found:])):
            are_all_ready = False
            continue
        if not pages.fits(sequence, found, queues.running):
            return are_all_ready  # no later sequence starts before the first that does not fit
        if pages.tier is not None and pages.tier.holds_back(sequence, keys, found):
            are_all_ready = False
            continue
        queues.start(sequence)
        pages.reuse_prefix(sequence)
        in_flight.note([sequence])
    return False


def plan_prefill(step: StepBuilder, max_tokens: int, max_logit_rows: int) -> None:
    """Split a budget of tokens among the running sequences in prefill."""
    running = step.queues.running
    if len(step.plan.chunks) == len(running) or max_tokens <= 0:
        return  # every running sequence has its decode
    prompts = [each for each in running if step.is_in_prompt(each)]
    if not prompts:
        return
    oldest, *others = prompts
    first_priority = oldest.request.priority
    others.sort(key=lambda each: (each.request.priority, step.num_ranked(each), each.arrival))
    shorter = (step.num_ranked(each) for each in others if each.request.priority == first_priority)
    needed_by_shorter = sum(each for each in shorter if each < step.num_ranked(oldest))
    for_others = min(needed_by_shorter, int(max_tokens * (1 - _RESERVED_FOR_OLDEST)))
    tokens_left, rows_left = max_tokens, max_logit_rows
    # The oldest comes again at the end: the limit on logit rows may leave tokens unused.
    for sequence in (oldest, *others, oldest):
        if not sequence.is_running or not tokens_left:
            continue  # an earlier chunk preempted it, or used the last token
        given = step.plan.chunks.get(sequence)
        tokens, rows = (given.num_tokens, given.num_scored_rows) if given else (0, 0)
        most_tokens = min(step.num_left(sequence), tokens + tokens_left - for_others)
        chunk = _prefill_chunk(sequence, step.first(sequence), most_tokens, rows + rows_left)
        for_others = 0
        if step.add(chunk):
            tokens_left -= chunk.num_tokens - tokens
            rows_left -= chunk.num_scored_rows - rows


def _prefill_chunk(sequence: Sequence, first: int, max_tokens: int, max_rows: int) -> Chunk:
    """Return the sequence's next chunk within one tier and both limits."""
    tier = sequence.tier_at(first)
    # A sequence that is computed again goes through the same tiers as before.
    num_tokens = min(max_tokens, max(tier.ceiling - first, 1))
    chunk = Chunk(sequence, first, num_tokens, tier)
    if chunk.is_scored:
        # Every scored token needs a row of logits, the largest tensor of a step.
        num_unscored = max(0, sequence.num_scored - first)
        chunk = Chunk(sequence, first, min(num_tokens, num_unscored + max_rows), tier)
    return chunk


# The number of prefill tokens that a step may compute, so that a step stays short.
#
# Every sequence waits for a step to end. A decoding sequence waits for its next token, and a new
# request for its first. Prefill takes most of a long step, so its size follows the duration of the
# last steps. The sizes depend on the clock, but the generated text does not. A row has the same
# result in any chunk (to the bit on a CPU, within rounding elsewhere).
#
# Matrix products process rows in blocks. A block that is not full costs up to a third more per row
# (packed_linear.py). The rows of a step, decodes included, are therefore the nearest power of two.
# The duration of a step can differ from its target by a factor of up to 1.4.

# A model whose decode step takes long cannot pause for a tenth of a second only. A step beside
# decodes may then take a multiple of one without prefill (`StepCost`), so that prompts progress and
# the first tokens of a batch do not wait behind the next tokens of its earlier requests.

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
