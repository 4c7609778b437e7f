"""The state of a request while it is served. The scheduler and the engine share it."""

from dataclasses import dataclass, field

from model_runtime.cache.prefix_cache import Key, next_key, root_key
from model_runtime.request import Request
from rope import Tier


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known so far, how many of them are in the cache, and under which table."""

    request: Request
    arrival: int = 0  # order of arrival, from the scheduler
    token_ids: list[int] = field(default_factory=list)  # prompt and answer
    pages: list[int] = field(default_factory=list)  # page table, in order of position
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_published: int = 0  # of its pages, those offered to others
    is_trusted: bool = True  # False: what it has read may be ill, so it offers no more pages
    num_scored: int = 0  # prompt tokens whose rows have been delivered, or are not wanted
    num_cached_tokens: int | None = None  # prompt tokens found in the cache at the first start
    num_rescales: int = 0  # how often its table changed
    awaited_key: Key | None = None  # of the page that it waits for another to compute
    tier: Tier = field(init=False)  # the one in force for its newest token
    num_prompt_tokens: int = field(init=False)
    _keys: list[Key] = field(default_factory=list)  # of its full pages, under the first profile

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.num_prompt_tokens = len(self.request.prompt_ids)
        self.tier = self.request.placement.tier
        # A token's logprob comes from the row of the token before it.
        self.num_scored = max(0, self.request.sampling.prompt_logprobs_from - 1)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that a forward has still to see."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes the one token generated last."""
        return self.num_generated > 0 and self.num_uncomputed == 1

    def tier_at(self, position: int) -> Tier:
        """The tier in force when this position's key is computed.

        `grow` moves up with the tokens so far; a whole prompt is computed under the tier that
        covers it. A sequence that is rebuilt goes through the same tiers again. `grow-exact`
        computes every position under its newest tier.
        """
        placement = self.request.placement
        if placement.policy != "grow":
            return self.tier
        num_so_far = max(self.num_prompt_tokens, position + 1)
        return placement.tier_covering(num_so_far)

    @property
    def num_one_profile(self) -> int:
        """Leading positions that are computed under one profile, and so may be shared."""
        if self.request.placement.policy == "grow":
            return self.request.placement.tier.ceiling
        return len(self.token_ids)

    def page_keys(self, num_pages: int, page_size: int) -> list[Key]:
        """Prefix keys of its first full pages, under the profile of its first position."""
        if not self._keys:
            self._keys = [root_key(self.tier_at(0).profile, self.request.cache_salt)]
        while len(self._keys) <= num_pages:
            start = (len(self._keys) - 1) * page_size
            page = self.token_ids[start : start + page_size]
            assert len(page) == page_size, "a key for a page that is not full"
            self._keys.append(next_key(self._keys[-1], page))
        return self._keys[1 : num_pages + 1]

    def forget_computed(self) -> list[int]:
        """Start again from nothing; returns the pages it held, for the pool."""
        pages, self.pages = self.pages, []
        self.num_computed = self.num_published = 0
        self.is_trusted = True
        return pages

    def cross(self, tier: Tier) -> None:
        """Move to a higher tier."""
        self.tier = tier
        self.num_rescales += 1
        if self.request.placement.policy == "grow-exact":
            self._keys = []  # from here on its pages are those of another profile
