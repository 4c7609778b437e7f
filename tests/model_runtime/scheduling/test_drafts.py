"""The sources of a request's drafts, and how many of their tokens a step takes."""

import pytest

from ropewalk.model_runtime.scheduling.drafts.draft_lengths import Offer, take
from ropewalk.model_runtime.scheduling.drafts.drafter import NO_DRAFT, Draft, Drafter
from ropewalk.model_runtime.scheduling.step_cost import StepCost


def proposed(drafter: Drafter, token_ids: list[int], num_prompt: int, most: int = 6) -> list[int]:
    """Return the tokens of the next draft."""
    return list(drafter.propose(token_ids, num_prompt, most).token_ids)


def test_a_repeated_text_is_continued() -> None:
    """The newest of equally long matches is continued, and a period goes on beyond the end."""
    drafter = Drafter()
    assert proposed(drafter, [1, 2, 3, 4, 5, 6, 1, 2, 3], 9, 3) == [4, 5, 6]
    assert proposed(Drafter(), [9, 1, 2, 3, 1, 2, 3], 7, 5) == [1, 2, 3, 1, 2]
    assert Drafter().propose([1, 2, 3, 4, 5], 5, 6) is NO_DRAFT


def test_a_prediction_is_followed_and_found_again() -> None:
    """From the first token on; after a difference, behind an n-gram of the prediction."""
    drafter = Drafter([10, 11, 12, 13, 14, 15, 16])
    prompt = [1, 2]
    assert proposed(drafter, [*prompt], 2) == [10, 11, 12, 13, 14, 15]
    assert proposed(drafter, [*prompt, 10, 11], 2) == [12, 13, 14, 15, 16]
    assert proposed(drafter, [*prompt, 10, 11, 99], 2) == []
    assert proposed(drafter, [*prompt, 10, 11, 99, 12, 13, 14], 2) == [15, 16]


def test_the_longer_match_is_continued_and_the_prediction_if_they_are_alike() -> None:
    """The text and the prediction have the same n-gram, and go on differently."""
    prediction, answer = [50, 12, 13, 14, 15], [99, 12, 13, 14]
    assert proposed(Drafter(prediction), [70, 12, 13, 14, 20, *answer], 5) == [15]
    assert proposed(Drafter(prediction), [99, 12, 13, 14, 20, *answer], 5, 1) == [20]


def test_a_prediction_does_not_wait_for_the_index_of_a_long_prompt() -> None:
    """The prompt is indexed over many steps, and the first one has a draft."""
    prompt = [index % 1000 for index in range(20_000)]
    assert proposed(Drafter([7, 8, 9]), prompt, len(prompt)) == [7, 8, 9]


def test_wrong_forced_tokens_pause_themselves_only() -> None:
    """A grammar may force a text that the model cuts into other tokens."""
    drafter, text = Drafter(), [1, 2, 3, 4] * 30
    for _ in range(3):
        draft = drafter.propose(text, 4, 2, [8, 9])
        assert list(draft.token_ids) == [8, 9]
        drafter.verified(draft, 2, 0, len(text))
    assert list(drafter.propose(text, 4, 2, [8, 9]).token_ids) == [1, 2]
    assert list(drafter.propose(text * 2, 4, 2, [8, 9]).token_ids) == [8, 9]


def test_chosen_tokens_of_a_draft_are_counted_until_one_differs() -> None:
    """A token behind a wrong one is no token of the draft, even if it is the same."""
    drafter = Drafter()
    drafter.computed((5, 6, 7))
    for token_id in (5, 9, 7):
        drafter.chosen(token_id)
    assert drafter.counts == (1, 2)
    assert drafter.num_right == 1
    drafter.computed((4,))
    drafter.chosen(4)
    drafter.chosen(8)
    assert drafter.counts == (2, 2)


def test_forced_tokens_come_first() -> None:
    """A grammar leaves no choice about them."""
    draft = Drafter([5, 6]).propose([1, 2, 3], 3, 2, [7, 8, 9])
    assert list(draft.token_ids) == [7, 8]
    assert draft.rate > 0.9


def test_useless_drafts_lead_to_a_pause_that_a_right_one_ends() -> None:
    """After three misses nothing is proposed for 32 tokens, then for 64."""
    drafter, text = Drafter(), [1, 2, 3, 4] * 30
    for _ in range(3):
        draft = drafter.propose(text, 4, 6)
        assert draft is not NO_DRAFT
        drafter.verified(draft, 6, 0, len(text))
    assert drafter.propose([*text, 1, 2, 3], 4, 6) is NO_DRAFT
    later = text + [1, 2, 3, 4] * 8
    draft = drafter.propose(later, 4, 6)
    assert draft is not NO_DRAFT
    drafter.verified(draft, 6, 0, len(later))
    assert drafter.propose(later + [1, 2, 3, 4] * 8, 4, 6) is NO_DRAFT
    assert drafter.propose(later + [1, 2, 3, 4] * 16, 4, 6) is not NO_DRAFT


def test_wrong_drafts_lower_the_rate_of_their_source() -> None:
    """And right ones raise it."""
    drafter, text = Drafter(), [1, 2, 3, 4, 5, 6, 7, 8] * 4
    before = drafter.propose(text, 8, 6)
    drafter.verified(before, 6, 1, len(text))
    lower = drafter.propose(text, 8, 6)
    drafter.verified(lower, 6, 6, len(text))
    assert lower.rate < before.rate
    assert drafter.propose(text, 8, 6).rate > lower.rate


def learnt(seconds_by_rows: dict[int, float]) -> StepCost:
    """Return the cost after a hundred steps of each size."""
    cost = StepCost()
    for _ in range(100):
        for num_rows, seconds in seconds_by_rows.items():
            cost.note(num_rows, seconds)
    return cost


@pytest.mark.parametrize(
    ("seconds_by_rows", "num_sequences", "rate", "least", "most"),
    [
        ({1: 1.0, 8: 1.2}, 1, 0.95, 15, 15),  # rows cost nearly nothing
        ({1: 1.0, 8: 8.0}, 1, 0.95, 0, 0),  # a row costs a step
        ({1: 1.0, 8: 1.7}, 1, 0.5, 1, 3),
        ({12: 1.0, 16: 1.3}, 12, 0.5, 0, 0),  # many sequences: a row gives less than it takes
        ({12: 1.0, 16: 1.02}, 12, 0.9, 4, 4),  # up to the most rows of a step
    ],
)
def test_as_many_tokens_are_taken_as_pay(
    seconds_by_rows: dict[int, float], num_sequences: int, rate: float, least: int, most: int
) -> None:
    """The number follows the measured steps, the rate and the number of sequences."""
    offers = [Offer(Draft([1] * 15, rate, 0)) for _ in range(num_sequences)]
    take(offers, num_sequences, 16, learnt(seconds_by_rows))
    assert least <= sum(offer.num_taken for offer in offers) <= most


def test_the_surest_draft_is_taken_first() -> None:
    """One sequence has a good draft, another a poor one."""
    poor, good = Offer(Draft([1] * 15, 0.3, 0)), Offer(Draft([1] * 15, 0.9, 0))
    take([poor, good], 2, 16, StepCost())
    assert good.num_taken > 5
    assert poor.num_taken <= 1
