"""The engine's limits, fixed at start."""

from dataclasses import dataclass

DEFAULT_DRAFT_TOKENS = 15
# The most rows of a step with drafts on a GPU: reading the weights takes most of its time.
MOST_DRAFT_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The limits of the scheduler and the cache, with units in their names."""

    kv_cache_tokens: int  # positions that all running sequences share
    max_model_len: int  # positions of the longest sequence
    page_size: int = 64  # positions in a page
    max_num_seqs: int = 32  # sequences in one step
    max_num_batched_tokens: int = 512  # tokens in one step: decodes plus prefill chunks
    step_target_s: float | None = None  # target of a step with prefill; None: no target
    max_num_logit_rows: int = 256  # prompt positions with logprobs in one step
    num_rope_tables: int = 1  # profiles that requests may have; their tables get memory at start
    # Tokens a sequence; 0: no speculation; None: the default if no bit can change, else 0.
    max_draft_tokens: int | None = 0
    enforce_eager: bool = False  # on a GPU: no CUDA graphs of decode steps
    max_queued_requests: int = 256  # requests waiting to start
    max_queued_prompt_tokens: int | None = None  # tokens of their prompts; None: no limit

    @property
    def num_pages(self) -> int:
        """Whole pages that the cache holds."""
        return self.kv_cache_tokens // self.page_size

    @property
    def max_decode_rows(self) -> int:
        """Return the most rows of a decode step on a GPU: all sequences, or few with drafts."""
        num_drafted = self.max_num_seqs * (1 + (self.max_draft_tokens or 0))
        return max(
            self.max_num_seqs, min(num_drafted, MOST_DRAFT_ROWS, self.max_num_batched_tokens)
        )
