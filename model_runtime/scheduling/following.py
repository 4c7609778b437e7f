"""Plan the step after one that the device still runs, before its tokens are known.

Both steps only decode. The first one may end a sequence by an end token or a stop string. The
second one then computes a token too many, which is never delivered.
"""

from model_runtime.scheduling.sequence import Sequence
from model_runtime.scheduling.sequence_pages import SequencePages
from model_runtime.scheduling.step_plan import Chunk, StepPlan


def plan_following(plan: StepPlan, pages: SequencePages) -> StepPlan | None:
    """Return the decodes that follow those of a running plan; None if its tokens are needed first.

    A sequence that reaches max_tokens in the running plan is not in the next one. The tokens are
    needed if a sequence changes its tier, or if the pages do not suffice without preemption.
    Pages that were allocated until then stay allocated.
    """
    following = StepPlan()
    for sequence in plan.chunks:
        if not sequence.is_running or _is_at_max_tokens(sequence):
            continue
        if sequence.is_growing and _changes_tier(sequence):
            return None
        # The running plan computes one token, and this one the token after it.
        if not pages.allocate(sequence, sequence.num_computed + 2):
            return None
        following.chunks[sequence] = Chunk(sequence, 1, sequence.tier, is_decode=True)
    return following if following.chunks else None


def _is_at_max_tokens(sequence: Sequence) -> bool:
    """Return whether the token that is being computed is the last one."""
    return sequence.num_generated + 1 >= sequence.request.sampling.max_tokens


def _changes_tier(sequence: Sequence) -> bool:
    num_tokens = len(sequence.token_ids) + 1
    return sequence.request.placement.tier_covering(num_tokens) != sequence.tier
