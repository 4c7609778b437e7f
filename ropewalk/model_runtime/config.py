"""The engine's limits, fixed at start."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ropewalk.model_runtime.attention.quantised.page_format import quantises
from ropewalk.model_runtime.page_groups import ONE_GROUP, PageGroups

DEFAULT_DRAFT_TOKENS = 15
PAGE_UNIT = 32  # positions of a page in few bits are a multiple: two registers of a processor
# The most rows of a step with drafts on a GPU: reading the weights takes most of its time.
MOST_DRAFT_ROWS = 64


class _LowerStores(Protocol):
    """Settings of stores of pages below the cache."""

    @property
    def kv_disk(self) -> Path | None: ...

    @property
    def kv_store(self) -> str | None: ...

    @property
    def kv_offload_gib(self) -> float | None: ...


def lower_store_setting(settings: _LowerStores) -> str | None:
    """Return the setting that asks for a lower store; None: there is none."""
    if settings.kv_store is not None:
        return "kv_store"
    if settings.kv_disk is not None:
        return "kv_disk"
    return None if settings.kv_offload_gib is None else "kv_offload_gib"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The limits of the scheduler and the cache, with units in their names."""

    kv_cache_tokens: int  # positions that all running sequences share
    max_model_len: int  # positions of the longest sequence
    page_size: int = 64  # positions in a page
    kv_cache_dtype: str = "auto"  # of its numbers; auto: that of the model
    max_num_seqs: int = 32  # sequences in one step
    max_num_batched_tokens: int = 512  # tokens in one step: decodes plus prefill chunks
    step_target_s: float | None = None  # target of a step with prefill; None: no target
    # A step beside decodes may take four steps without prefill, if that is longer than the target.
    step_target_follows: bool = False
    max_num_logit_rows: int = 256  # prompt positions with logprobs in one step
    num_rope_tables: int = 1  # profiles that requests may have; their tables get memory at start
    # Tokens a sequence; 0: no speculation; None: the default if no bit can change, else 0.
    max_draft_tokens: int | None = 0
    num_state_slots: int = 0  # sequences and snapshots of a model with states; 0: it has none
    enforce_eager: bool = False  # on a GPU: no CUDA graphs of small steps
    max_queued_requests: int = 256  # requests waiting to start
    max_queued_prompt_tokens: int | None = None  # tokens of their prompts; None: no limit
    kv_disk: Path | None = None  # folder of pages that outlive the process; None: there is none
    kv_disk_gib: float | None = None  # its size, if there is one
    # Address of a store of such pages, in place of a folder; it may hold a password.
    kv_store: str | None = field(default=None, repr=False)
    kv_offload_gib: float | None = None  # of a GPU's host, for such pages before any other place
    page_groups: PageGroups = ONE_GROUP  # of layers, with a page each for the same positions

    @property
    def num_pages(self) -> int:
        """Whole pages that the cache holds, of all groups of layers."""
        return self.kv_cache_tokens // self.page_size * self.num_groups

    @property
    def num_groups(self) -> int:
        return self.page_groups.num_groups

    @property
    def capacity(self) -> int:
        """Return the positions that whole pages hold in all layers."""
        return self.kv_cache_tokens // self.page_size * self.page_size

    @property
    def longest_context(self) -> int:
        """Return the positions of the longest sequence that the cache holds alone."""
        return self.page_groups.longest(self.num_pages, self.page_size, self.max_num_batched_tokens)

    @property
    def room_beside_windows(self) -> int:
        """Return the positions that layers without a window may hold of one sequence."""
        return self.page_groups.room(self.num_pages, self.page_size, self.max_num_batched_tokens)

    def num_held_pages(self, num_positions: int, most: int | None = None) -> int:
        """Return the most pages that a sequence holds at a time.

        `most`: of a group whose layers read no window, if its positions release pages.
        """
        num_pages = -(-num_positions // self.page_size)
        whole = num_pages if most is None else min(num_pages, most)
        step = self.page_size, self.max_num_batched_tokens
        return self.page_groups.num_held(num_pages, *step, num_whole=whole)

    @property
    def lower_store_setting(self) -> str | None:
        """Return the setting that asks for a lower store; None: there is none."""
        return lower_store_setting(self)

    @property
    def quantises_pages(self) -> bool:
        """Return whether full pages are held in few bits (docs/design/kv-cache.md)."""
        return quantises(self.kv_cache_dtype)

    @property
    def max_decode_rows(self) -> int:
        """Return the most rows of a decode step on a GPU: all sequences, or few with drafts."""
        num_drafted = self.max_num_seqs * (1 + (self.max_draft_tokens or 0))
        return max(
            self.max_num_seqs, min(num_drafted, MOST_DRAFT_ROWS, self.max_num_batched_tokens)
        )

    @property
    def max_prompt_rows(self) -> int:
        """Return the most rows of a captured step with prompts (cuda_graphs.py); 0: none has any.

        A state advances token by token.
        """
        return 0 if self.num_state_slots else self.max_num_batched_tokens


def with_slots(
    config: EngineConfig,
    slot_bytes: int,
    affordable_bytes: int | None = None,
    kv_cache_tokens: int | None = None,
    kv_cache_gib: float | None = None,
) -> EngineConfig:
    """Return `config` with slots of `slot_bytes` for states, if there are any.

    There are two for each sequence of a step, so that snapshots have as many as sequences, and one
    for drafts. They take at most half of `kv_cache_gib`, or of `affordable_bytes`, but for one. If
    fewer than the sequences, then fewer sequences run at a time. A size in tokens is for the pages
    alone.
    """
    if not slot_bytes:
        return config
    most_bytes = affordable_bytes if kv_cache_gib is None else int(kv_cache_gib * 2**30)
    num_slots = 2 * config.max_num_seqs + (config.max_draft_tokens != 0)
    if kv_cache_tokens is None and most_bytes is not None:
        num_slots = min(num_slots, max(1, most_bytes // 2 // slot_bytes))
    most = min(config.max_num_seqs, num_slots)
    return replace(config, num_state_slots=num_slots, max_num_seqs=most)
