"""The state of a request while it is served, used by the scheduler and the engine."""

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from ropewalk.model_runtime.deployments.deployment import TierChoice
from ropewalk.model_runtime.request import Request
from ropewalk.model_runtime.scheduling.prefix_cache import (
    Key,
    extend_keys,
    extend_text_keys,
    first_page_read,
    num_sharable,
)
from ropewalk.rope import Tier

HOLE = -1  # in place of a released page, which no later query of the sequence reads


class Kept(NamedTuple):
    """The tokens that a sequence reads: its first and its last ones (`sinks`).

    The pages between them are released while it runs, and leave holes in its page table.
    """

    num_first: int  # s, from the first token on
    num_last: int  # r, the newest included

    def droppable(self, num_computed: int, page_size: int) -> tuple[int, int]:
        """Return the pages, from this one up to that one, that no later query reads."""
        first_read = first_page_read(num_computed, self.num_last, page_size)
        return -(-self.num_first // page_size), first_read


def most_pages(tier_choice: TierChoice, page_size: int, max_chunk: int) -> int | None:
    """Return the most pages that a request holds at a time; None: all of its positions.

    A step computes at most `max_chunk` of its tokens. A page is released a page late at most.
    """
    tiers = tier_choice.all_tiers
    method = tiers[-1].profile.positions
    if method is None or method.kept is None:
        return None
    num_first, num_last = method.kept
    # A growing request may be computed natively up to the end of an earlier tier.
    held = max([num_last, *(tier.ceiling for tier in tiers[:-1])])
    return -(-num_first // page_size) + -(-(held + max_chunk) // page_size) + 2


@dataclass(slots=True)
class HeldState:
    """The slots of states that a running sequence has, and the snapshots that it will take."""

    own: int  # the slot that only this sequence reads and writes
    read: int | None  # the slot with the state after its first `num_tokens`; None: zeros
    planned: list[int]  # positions of snapshots in its known tokens, ascending
    num_tokens: int  # those computed; fewer after a draft, whose right tokens come later
    pending: list[tuple[int, int]] = field(default_factory=list)  # position, slot; of a step
    next: int | None = None  # the slot with the state after the step that runs
    next_tokens: int = 0  # its tokens
    draft_row: int = 0  # place of the step's flat row where the draft begins
    draft_begin: int = 0  # the position of that token
    newest: tuple[int, Key] | None = None  # the last snapshot in the answer, and its key
    last_planned: int = field(init=False)

    def __post_init__(self) -> None:
        self.last_planned = self.planned[-1] if self.planned else 0

    def plan(self, position: int) -> None:
        """Note a position of a snapshot, between its computed tokens and the last planned one."""
        if position not in self.planned:
            insort(self.planned, position)

    def slots(self) -> list[int]:
        """Return the slots that are released with the sequence."""
        pending = [slot for _, slot in self.pending]
        return [self.own, *pending, *({self.read} - {self.own, None, *pending})]  # type: ignore[list-item]


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens known so far, the number of them in the cache, and their tier."""

    request: Request
    arrival: int = 0  # order of arrival, from the scheduler
    token_ids: list[int] = field(default_factory=list)  # prompt and answer
    # Page table, in order of position; the pages of several groups of layers stand side by side.
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_published: int = 0  # leading pages that other sequences can find
    is_running: bool = False  # False: it waits, or has ended
    is_cacheable: bool = True  # False: it may have read bad pages, so it publishes no more
    num_scored: int = 0  # prompt tokens whose rows were delivered or not requested
    num_cached_tokens: int | None = None  # prompt tokens found in the cache at the first start
    num_under_others: int = 0  # further ones that the cache had then, under other tables only
    num_rescales: int = 0  # number of rotation table changes
    # By group, the page after the last one that was released as never read again.
    ends_dropped: dict[int, int] = field(default_factory=dict)
    waits_for: Key | None = None  # the key of a page that another sequence computes
    not_on_disk: Key | None = None  # the missing page that the lower store was last asked for
    tail_page: int = 0  # of a running sequence, in a cache that quantises pages
    state: HeldState | None = None  # None: it does not run, or the model has no states
    tier: Tier = field(init=False)  # the one in force for its newest token
    num_prompt_tokens: int = field(init=False)
    _keys: list[Key] = field(default_factory=list)  # of its sharable full pages
    _text_keys: list[Key] = field(default_factory=list)  # of its full pages, without their tables

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.num_prompt_tokens = len(self.request.prompt_ids)
        self.tier = self.request.tier_choice.tier
        # A token's logprob comes from the row of the token before it.
        self.num_scored = max(0, self.request.sampling.prompt_logprobs_from - 1)

    @property
    def rank(self) -> tuple[int, int]:
        """Return its place among all sequences: by priority, then by arrival."""
        return self.request.priority, self.arrival

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def placed(self) -> tuple[int, Tier, int]:
        """Return what every output reports: its cached tokens, tier and tier changes."""
        return self.num_cached_tokens or 0, self.tier, self.num_rescales

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Return whether its next step computes only the last generated token."""
        num_known = len(self.token_ids)
        return num_known > self.num_prompt_tokens and num_known - self.num_computed == 1

    def tier_at(self, position: int) -> Tier:
        """Return the tier in force when this position's key is computed.

        `grow` changes to higher tiers as the tokens grow. A whole prompt is computed under the
        tier that covers it. A sequence that is computed again goes through the same tiers.
        `by_position` computes every position under the lowest tier that covers it, of prompts, too.
        `grow-exact` computes every position under its newest tier.
        """
        tier_choice = self.request.tier_choice
        if tier_choice.policy == "by_position":
            return tier_choice.tier_covering(position + 1)
        if tier_choice.policy != "grow":
            return self.tier
        num_so_far = max(self.num_prompt_tokens, position + 1)
        return tier_choice.tier_covering(num_so_far)

    @property
    def num_sharable(self) -> int:
        """Return the number of leading positions whose pages may be shared."""
        found = num_sharable(self._key_tiers, len(self.token_ids))
        tier_choice = self.request.tier_choice
        # Beyond it, the length of the prompt decides on the table of a position.
        return min(found, tier_choice.tier.ceiling) if tier_choice.policy == "grow" else found

    @property
    def _key_tiers(self) -> tuple[Tier, ...]:
        tier_choice = self.request.tier_choice
        return tier_choice.all_tiers if tier_choice.policy == "by_position" else (self.tier_at(0),)

    @property
    def kept(self) -> Kept | None:
        """Return the tokens that its next queries read; None: all."""
        tier_choice = self.request.tier_choice
        # After the last position of the last tier there is no query.
        last = tier_choice.all_tiers[-1].ceiling - 1
        method = self.tier_at(min(self.num_computed, last)).profile.positions
        return None if method is None or method.kept is None else Kept(*method.kept)

    def page_keys(self, num_pages: int, page_size: int) -> list[Key]:
        """Return the prefix keys of its first full pages, which are sharable."""
        extend_keys(
            self._keys,
            self.token_ids,
            num_pages,
            page_size,
            tiers=self._key_tiers,
            cache_salt=self.request.cache_salt,
        )
        return self._keys[1 : num_pages + 1]

    def text_keys(self, num_pages: int, page_size: int) -> list[Key]:
        """Return the keys of its first full pages that do not depend on tables."""
        salt = self.request.cache_salt
        extend_text_keys(self._text_keys, self.token_ids, num_pages, page_size, salt)
        return self._text_keys[1 : num_pages + 1]

    def forget_computed(self) -> list[int]:
        """Reset the computed state, and return the held pages so the pool can release them."""
        pages, self.pages = self.pages, []
        self.num_computed = self.num_published = 0
        self.ends_dropped.clear()
        self.is_cacheable = True
        return pages

    def move_to(self, tier: Tier) -> None:
        """Move to a higher tier."""
        self.tier = tier
        self.num_rescales += 1
        if self.request.tier_choice.policy == "grow-exact":
            self._keys = []  # from now on its pages have another profile
