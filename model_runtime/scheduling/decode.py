"""Plan the decodes of a step: one token for each sequence that generates."""

from model_runtime.scheduling.step_builder import StepBuilder
from model_runtime.scheduling.step_plan import Chunk


def plan_decodes(step: StepBuilder) -> None:
    """Add the next token of every decoding sequence, oldest first.

    If `grow-exact` changes a sequence's tier, then its keys and values are computed again from the
    start, under the new table and on other pages. The sequence is in prefill from then on.
    """
    for sequence in list(step.queues.running):
        # An earlier sequence of this loop may have preempted this one.
        if not (sequence.is_running and sequence.is_decoding):
            continue
        if sequence.is_growing and step.change_tier(sequence):
            step.pages.release(sequence)
            step.pages.reuse_prefix(sequence)
            if not sequence.is_decoding:
                continue
        # Its newest token has the tier that is in force for the whole sequence.
        step.add(Chunk(sequence, 1, sequence.tier, is_decode=True))
