"""How many tokens of each draft a step computes.

A token of a draft pays if its chance is worth more than the time of its row. With C seconds for
a step that gives E tokens, a row of b seconds pays if its chance is above b E / C. E grows with
the number of sequences, so many sequences leave no room for drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ropewalk.model_runtime.scheduling.drafts.drafter import Draft
from ropewalk.model_runtime.scheduling.step_cost import StepCost


@dataclass(slots=True)
class Offer:
    """A sequence's draft, and the number of its tokens that the step computes."""

    draft: Draft
    num_taken: int = 0

    @property
    def next_chance(self) -> float:
        """Return the chance that the first token that is not taken yet is right."""
        if self.num_taken >= len(self.draft.token_ids):
            return 0.0
        return self.draft.rate ** (self.num_taken + 1)


def take(offers: Sequence[Offer], num_sequences: int, most_rows: int, cost: StepCost) -> None:
    """Choose the number of tokens that each offer gives to a step of `num_sequences` decodes."""
    seconds, per_row = cost.line(num_sequences)
    num_expected = float(num_sequences)
    for _ in range(most_rows - num_sequences):
        best = max(offers, key=_next_chance)
        chance = best.next_chance
        if chance <= 0 or chance * seconds <= per_row * num_expected:
            return
        best.num_taken += 1
        num_expected += chance
        seconds += per_row


def _next_chance(offer: Offer) -> float:
    return offer.next_chance
