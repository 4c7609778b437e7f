"""Plan the prefill of a step: which waiting sequences start, and which prompt tokens are computed.

Among prompts of one priority, those with the fewest uncomputed tokens go first, so a short prompt
does not wait for a long one. A prompt that waits for pages of another lends it its rank. A quarter
of the budget is reserved for the oldest prompt of the first priority, so the longest prompt
completes.
"""

from collections.abc import Iterable

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
    # No sequence waits for a page that another one computes, or that the lower store reads.
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
        if pages.lower_store is not None and pages.lower_store.holds_back(sequence, keys, found):
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
