"""A router's page keys are those of the engine's own prefix cache."""

import pytest

from ropewalk.model_runtime.deployments.deployment import Placement
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.model_runtime.scheduling.sequence_pages import SequencePages
from ropewalk.rope import Linear, Policy, Profile, Tier, Unscaled
from ropewalk.rope.two_ranges import ReRope, Sinks
from ropewalk.server.replicas.prompt_pages import MOST_PAGES, prompt_pages

PAGE_SIZE = 16
MOVED = Tier(512, 4.0, Profile(Unscaled(), None, ReRope(window=32)))
DROPPED = Tier(512, 4.0, Profile(Unscaled(), None, Sinks(sinks=4, window=60)))
LOW, HIGH = Tier(128, 1.0, Profile(Unscaled())), Tier(512, 4.0, Profile(Linear(factor=4.0)))


def sequence_of(
    num_tokens: int, policy: Policy, tier: Tier = LOW, prompt_logprobs: int | None = None
) -> Sequence:
    """A request as the scheduler sees it."""
    higher = (HIGH,) if tier is LOW else ()
    placement = Placement("m", tier, higher, policy, None, 128)
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Sequence(Request("r", tuple(range(num_tokens)), sampling, placement, "salt"))


@pytest.mark.parametrize("policy", ["fixed", "pinned", "grow", "grow-exact", "by_position"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 100, 128])
def test_keys_are_those_that_the_scheduler_looks_up(num_tokens: int, policy: Policy) -> None:
    """The last token is never among them, even if it completes a page."""
    for tier in (LOW, HIGH, MOVED, DROPPED):
        sequence = sequence_of(num_tokens, policy, tier)
        expected = SequencePages(8, PAGE_SIZE, 64).reusable_keys(sequence)
        asked = prompt_pages(sequence.token_ids, (tier,), "salt", PAGE_SIZE)
        assert list(asked.reusable_keys) == expected
        if tier is not DROPPED:
            assert len(asked.keys) == num_tokens // PAGE_SIZE


def test_a_scored_prompt_reads_no_page_but_leaves_its_own() -> None:
    """Cached positions have no logits, so its prompt is computed whole."""
    sequence = sequence_of(40, "fixed", prompt_logprobs=0)
    assert SequencePages(8, PAGE_SIZE, 64).reusable_keys(sequence) == []
    asked = prompt_pages(sequence.token_ids, (LOW,), "salt", PAGE_SIZE, is_scored=True)
    assert asked.reusable_keys == ()
    assert len(asked.keys) == 2


def test_another_profile_salt_or_token_changes_every_key_after_it() -> None:
    """A page's key holds all that its content depends on."""
    tokens = list(range(64))
    plain = prompt_pages(tokens, (LOW,), "", PAGE_SIZE)
    assert plain == prompt_pages(tuple(tokens), (LOW,), "", PAGE_SIZE)
    others = [
        prompt_pages(tokens, (HIGH,), "", PAGE_SIZE),
        prompt_pages(tokens, (LOW,), "other", PAGE_SIZE),
        prompt_pages([99, *tokens[1:]], (LOW,), "", PAGE_SIZE),
    ]
    for other in others:
        assert not set(plain.keys) & set(other.keys)
    late = prompt_pages([*tokens[:-1], 99], (LOW,), "", PAGE_SIZE)
    assert late.keys[:3] == plain.keys[:3]
    assert late.keys[3] != plain.keys[3]


def test_the_number_of_keys_is_bounded() -> None:
    """A prompt of any length costs a bounded time and memory in every router."""
    asked = prompt_pages(range((MOST_PAGES + 3) * 4), (LOW,), "", 4)
    assert len(asked.keys) == len(asked.reusable_keys) == MOST_PAGES
    assert asked.num_tokens == (MOST_PAGES + 3) * 4
