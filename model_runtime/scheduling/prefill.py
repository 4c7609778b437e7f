"""Plan the prefill of a step: which waiting sequences start, and which prompt tokens are computed.

Among prompts of one priority, those with the fewest uncomputed tokens go first, so a short prompt
does not wait for a long one. A quarter of the budget is reserved for the oldest prompt of the first
priority, so the longest prompt completes.
"""

from model_runtime.cache.prefix_cache import Key
from model_runtime.scheduling.sequence import Sequence
from model_runtime.scheduling.step_builder import StepBuilder
from model_runtime.scheduling.step_plan import Chunk

_RESERVED_FOR_OLDEST = 0.25  # of a step's prefill, even if shorter prompts wait


def start_waiting(step: StepBuilder, max_num_seqs: int) -> bool:
    """Start waiting sequences in the order of their ranks, until one does not fit the free pages.

    Returns True if only the end of another sequence can let one more start.
    """
    queues, pages = step.queues, step.pages
    are_all_ready = True  # no sequence waits for a page that another one computes
    # Pages in computation, and the earliest priority that computes each. A sequence of an earlier
    # one does not wait, because prompts between the two could keep such a page waiting without end.
    in_flight: dict[Key | None, int] = {}

    def note(running: Sequence) -> None:
        priority = running.request.priority
        for key in pages.keys_in_flight(running):
            in_flight[key] = min(priority, in_flight.get(key, priority))

    for each in queues.running:
        note(each)
    for sequence in list(queues.waiting):
        if len(queues.running) >= max_num_seqs:
            return are_all_ready
        priority = sequence.request.priority
        if in_flight.get(sequence.waits_for, priority + 1) <= priority:
            are_all_ready = False
            continue
        step.change_tier(sequence)  # if it was preempted just before
        keys = pages.reusable_keys(sequence)
        found = pages.index.match(keys)
        missing = keys[len(found)] if len(found) < len(keys) else None
        if in_flight.get(missing, priority + 1) <= priority:
            # Another sequence computes this page. The sequence starts when the page can be shared.
            sequence.waits_for = missing
            are_all_ready = False
            continue
        num_new = pages.num_to_hold(sequence) - len(found)
        # A cached page that is reused can no longer be evicted.
        num_taken = num_new + sum(map(pages.pool.is_cached, found))
        if num_taken + pages.num_reserved(queues.running) > pages.pool.num_available:
            return are_all_ready  # no later sequence starts before the first that does not fit
        queues.start(sequence)
        pages.reuse_prefix(sequence)
        note(sequence)
    return False


def plan_prefill(step: StepBuilder, max_tokens: int, max_logit_rows: int) -> None:
    """Split a budget of tokens among the running sequences in prefill."""
    running = step.queues.running
    if len(step.plan.chunks) == len(running) or max_tokens <= 0:
        return  # every running sequence has its decode
    prompts = [each for each in running if not each.is_decoding]
    if not prompts:
        return
    oldest, *others = prompts
    first_priority = oldest.request.priority
    others.sort(key=lambda each: (each.request.priority, each.num_uncomputed, each.arrival))
    shorter = (each.num_uncomputed for each in others if each.request.priority == first_priority)
    needed_by_shorter = sum(each for each in shorter if each < oldest.num_uncomputed)
    for_others = min(needed_by_shorter, int(max_tokens * (1 - _RESERVED_FOR_OLDEST)))
    tokens_left, rows_left = max_tokens, max_logit_rows
    # The oldest comes again at the end: the limit on logit rows may leave tokens unused.
    for sequence in (oldest, *others, oldest):
        if not sequence.is_running or not tokens_left:
            continue  # an earlier chunk preempted it, or used the last token
        given = step.plan.chunks.get(sequence)
        tokens, rows = (given.num_tokens, given.num_scored_rows) if given else (0, 0)
        chunk = _prefill_chunk(sequence, tokens + tokens_left - for_others, rows + rows_left)
        for_others = 0
        if step.add(chunk):
            tokens_left -= chunk.num_tokens - tokens
            rows_left -= chunk.num_scored_rows - rows


def _prefill_chunk(sequence: Sequence, max_tokens: int, max_rows: int) -> Chunk:
    """Return the sequence's next chunk within one tier and both limits."""
    first = sequence.num_computed
    tier = sequence.tier_at(first)
    # A sequence that is computed again goes through the same tiers as before.
    num_tokens = min(sequence.num_uncomputed, max_tokens, max(tier.ceiling - first, 1))
    chunk = Chunk(sequence, num_tokens, tier)
    if chunk.is_scored:
        # Every scored token needs a row of logits, the largest tensor of a step.
        num_unscored = max(0, sequence.num_scored - first)
        chunk = Chunk(sequence, min(num_tokens, num_unscored + max_rows), tier)
    return chunk
