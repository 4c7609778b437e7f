"""The engine's limits, decided once at start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every number the scheduler and the cache are held to; units in the names."""

    kv_cache_tokens: int  # positions that all running sequences share
    max_model_len: int  # positions of the longest sequence
    page_size: int = 16  # positions in a page
    max_num_seqs: int = 32  # sequences in one step
    max_num_batched_tokens: int = 512  # tokens in one step: decodes plus prefill chunks
    max_num_logit_rows: int = 256  # prompt positions in one step whose logprobs are wanted
    max_queued_requests: int = 256  # requests waiting to start

    @property
    def num_pages(self) -> int:
        """Whole pages that the cache holds."""
        return self.kv_cache_tokens // self.page_size
