"""Drafts that no drafter would make: right, wrong or mixed, of any length, in every step."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ropewalk.model_runtime.engine import speculator
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.request import Request
from ropewalk.model_runtime.scheduling.drafts.drafter import NO_DRAFT, Draft, Drafter
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import Result


class Counted(Observer):
    """Counts the tokens of drafts."""

    def __init__(self) -> None:
        self.num_drafted = self.num_accepted = self.num_preempted = 0

    def speculated(self, num_drafted: int, num_accepted: int) -> None:
        """Count a draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def preempted(self, request: Request) -> None:
        """Count a preemption."""
        self.num_preempted += 1


class Company(Counted):
    """Counts what a request may share with others, besides drafts."""

    num_cached = 0

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Count the tokens of a cached prefix."""
        self.num_cached += num_cached_tokens


class Adversary(Drafter):
    """Drafts that are right, wrong or mixed, at random; it knows the answers."""

    answers: dict[tuple[int, ...], list[tuple[int, ...]]]
    rng: random.Random
    share_right: float
    share_silent = 0.0  # of the calls without a draft

    def propose(
        self, token_ids: Sequence[int], num_prompt: int, most: int, forced_ids: Sequence[int] = ()
    ) -> Draft:
        """Return up to `most` tokens, each right with the chance `share_right`, or none."""
        if self.rng.random() < self.share_silent:
            return NO_DRAFT
        generated = tuple(token_ids[num_prompt:])
        right: tuple[int, ...] = ()
        for known in self.answers[tuple(token_ids[:num_prompt])]:
            if known[: len(generated)] == generated:
                right = known[len(generated) :]
        count = self.rng.randint(1, most)
        draft = []
        for place in range(count):
            is_right = place < len(right) and self.rng.random() < self.share_right
            draft.append(right[place] if is_right else self.rng.randrange(VOCAB_SIZE))
        return Draft(draft, 1.0, 0)

    def verified(self, draft: Draft, num_drafted: int, num_accepted: int, num_known: int) -> None:
        """Learn nothing."""


def take_all(offers: Sequence[Any], num_sequences: int, most_rows: int, cost: Any) -> None:
    """Take drafts until the step is full, whatever their rows cost."""
    left = most_rows - num_sequences
    for offer in offers:
        offer.num_taken = min(left, len(offer.draft.token_ids))
        left -= offer.num_taken


def use_adversary(monkeypatch: pytest.MonkeyPatch) -> type[Adversary]:
    """Put an adversary in the place of the drafter, whose drafts always fill the step."""

    class OfThisTest(Adversary):
        """A class of its own, because tests set attributes of it."""

    monkeypatch.setattr(speculator, "Drafter", OfThisTest)
    monkeypatch.setattr(speculator, "take", take_all)
    return OfThisTest


def tell(
    adversary: type[Adversary],
    seed: int,
    share_right: float,
    known: Sequence[tuple[Request, Result]],
) -> None:
    """Tell the adversary the answers, and how many of its tokens are right."""
    adversary.rng, adversary.share_right = random.Random(seed), share_right
    adversary.answers = {}
    for each, result in known:
        adversary.answers.setdefault(each.prompt_ids, []).append(result.token_ids)
