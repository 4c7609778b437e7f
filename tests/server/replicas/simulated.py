"""Replicas without a model, each with a real page pool and prefix index."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ropewalk.model_runtime.scheduling.page_pool import PagePool
from ropewalk.model_runtime.scheduling.prefix_cache import Key, PrefixIndex, extend_keys
from ropewalk.rope import Profile, Tier, Unscaled
from ropewalk.server.replicas.choice import ReplicaChoice
from ropewalk.server.replicas.text_chunks import TextChunks

PAGE_SIZE = 64
NUM_QUEUED = 4  # the newest requests, which have no token yet
TIERS = (Tier(1 << 20, 1.0, Profile(Unscaled())),)


def prompt_of(prefix: int, num_pages: int, tail: int = 0, *, salt: str = "") -> TextChunks:
    """A prompt of a prefix's full pages, and five tokens of its own."""
    tokens = [prefix * 1000 + at for at in range(num_pages * PAGE_SIZE)]
    return chunked([*tokens, *[tail] * 5], TIERS, salt, PAGE_SIZE)


def chunked(tokens: Sequence[int], tiers: Sequence[Tier], salt: str, page_size: int) -> TextChunks:
    """A prompt with the keys of the engine's own prefix cache."""
    keys: list[Key] = []
    num_pages = len(tokens) // page_size
    extend_keys(keys, tokens, num_pages, page_size, tiers=tiers, cache_salt=salt)
    return TextChunks(len(tokens), page_size, tuple(keys[1:]))


class PooledReplica:
    """The prefix cache of one replica, as the engine has it."""

    def __init__(self, num_pages: int) -> None:
        self.index = PrefixIndex()
        self.pool = PagePool(num_pages, self.index)

    def start(self, asked: TextChunks) -> tuple[list[int], int]:
        """Give a prompt its pages; return them, and how many were cached."""
        found = self.index.match(asked.reusable_keys)
        self.pool.share(found)
        num_pages = -(-asked.num_tokens // asked.chunk_size)
        pages = [*found, *self.pool.allocate(num_pages - len(found))]
        for page, key in zip(pages, asked.keys, strict=False):
            if not self.index.holds(page):
                self.index.publish(page, key)
        return pages, len(found)


@dataclass
class Outcome:
    """The hits of a run of requests."""

    num_pages: int = 0  # full pages of all prompts
    num_cached: int = 0  # of them, found in a replica's cache
    num_predicted: int = 0  # of them, expected there by the choice
    served: Counter[str] = field(default_factory=Counter)  # requests by replica

    @property
    def hit_share(self) -> float:
        """The cached share of the prompts' full pages."""
        return self.num_cached / self.num_pages

    @property
    def imbalance(self) -> float:
        """The requests of the busiest replica, over the mean."""
        return max(self.served.values()) * len(self.served) / sum(self.served.values())


def served(
    choice: ReplicaChoice,
    prompts: list[TextChunks],
    num_pages: dict[str, int],
    in_flight: int,
    rng: random.Random,
) -> Outcome:
    """Serve prompts in order, at most `in_flight` at a time; a random one of these ends.

    The pools have room for the tails of the open requests beside `num_pages`.
    """
    choice.update(num_pages)
    replicas = {name: PooledReplica(num + 2 * in_flight) for name, num in num_pages.items()}
    outcome = Outcome(served=Counter(dict.fromkeys(replicas, 0)))
    running: list[tuple[str, str, list[int]]] = []

    def end_one() -> None:
        request_id, name, pages = running.pop(rng.randrange(len(running)))
        choice.ended(request_id)
        replicas[name].pool.release(pages)

    for number, asked in enumerate(prompts):
        if len(running) == in_flight:
            end_one()
        request_id = f"request-{number}"
        name = choice.rank(asked, replicas, request_id)[0]
        outcome.num_predicted += choice.routed(request_id, asked, name) // asked.chunk_size
        pages, num_cached = replicas[name].start(asked)
        running.append((request_id, name, pages))
        for earlier, _, _ in running[:-NUM_QUEUED]:
            choice.first_token(earlier)
        outcome.num_pages += len(asked.keys)
        outcome.num_cached += num_cached
        outcome.served[name] += 1
    while running:
        end_one()
    return outcome
