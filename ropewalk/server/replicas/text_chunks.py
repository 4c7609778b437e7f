"""The keys of a prompt's chunks, and those that a router remembers of each replica."""

from collections.abc import Sequence
from dataclasses import dataclass

from ropewalk.model_runtime.scheduling.prefix_cache import Key

# A key costs about 3 microseconds and 100 bytes for each replica that holds it. At the default page
# size these are 262,144 tokens. Prompts that are equal so far may differ after it unnoticed.
MOST_CHUNKS = 4096


@dataclass(frozen=True, slots=True)
class TextChunks:
    """A prompt as a router sees it: its length, and the keys of its full chunks."""

    num_tokens: int
    chunk_size: int  # tokens
    keys: tuple[Key, ...]  # of its leading full chunks; a replica publishes them all as pages
    is_scored: bool = False  # its prompt's logprobs are wanted, so it reads no cached page

    @property
    def reusable_keys(self) -> tuple[Key, ...]:
        """Return the keys of the chunks that it could reuse, which never hold the last token.

        The last token is always computed, because its logits give the first answer token.
        `SequencePages.reusable_keys` has the same rule.
        """
        if self.is_scored:
            return ()
        return self.keys[: max(0, self.num_tokens - 1) // self.chunk_size]


class PageMemory:
    """The most recently used page keys of one replica, at most as many as its cache has pages.

    It can be wrong in both directions: answers take pages, too, and other routers send requests.
    A wrong guess costs time only, because the replica looks its own pages up.
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self._keys: dict[Key, None] = {}  # in order of last use, oldest first

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[Key]) -> int:
        """Return the number of leading keys that are remembered."""
        for num_known, key in enumerate(keys):
            if key not in self._keys:
                return num_known
        return len(keys)

    def num_evicted_by(self, keys: Sequence[Key]) -> int:
        """Return how many pages of other prompts `note` would forget for these keys."""
        num_new = min(len(keys), self.max_pages) - self.match(keys)
        return max(0, len(self._keys) + num_new - self.max_pages)

    def note(self, keys: Sequence[Key]) -> None:
        """Remember a prompt's keys as the most recent, and drop the least recent beyond the bound.

        The last page of a prompt is the first to go, as in the page pool: a prefix is more useful
        than its continuation.
        """
        for key in reversed(keys[: self.max_pages]):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self.max_pages:
            del self._keys[next(iter(self._keys))]
