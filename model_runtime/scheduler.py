"""Which tokens the next step computes. Plain Python: it can be tested in milliseconds.

Decodes go first, one token each; what is left of the token budget goes to prefill in chunks, in
order of arrival. A sequence takes all pages it can ever need when it starts, so nothing that runs
has to be thrown out. Waiting requests start in order: the first is never overtaken, so it starts
as soon as enough pages are back.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from model_runtime.config import EngineConfig
from model_runtime.page_pool import PagePool
from model_runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that the next step computes."""

    sequence: Sequence
    num_tokens: int

    @property
    def first(self) -> int:
        """Position of its first token."""
        return self.sequence.num_computed

    @property
    def is_last(self) -> bool:
        """Whether it reaches the end of the known tokens, so that a new one can be chosen."""
        return self.num_tokens == self.sequence.num_uncomputed


class Scheduler:
    """Owner of the two queues and of the page pool."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.pool = PagePool(config.num_pages)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the cache alone (checked at admission)."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step; empty when nothing waits or runs."""
        self._start_waiting()
        chunks = [Chunk(sequence, 1) for sequence in self.running if sequence.is_decoding]
        tokens_left = self._config.max_num_batched_tokens - len(chunks)
        rows_left = self._config.max_num_logit_rows
        for sequence in self._prefilling():
            num_tokens = min(sequence.num_uncomputed, tokens_left)
            if sequence.request.sampling.prompt_logprobs is not None:
                # Every one of its tokens is a row of logits, the largest tensor of a step.
                num_tokens = min(num_tokens, rows_left)
                rows_left -= num_tokens
            if num_tokens > 0:
                chunks.append(Chunk(sequence, num_tokens))
                tokens_left -= num_tokens
        return chunks

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and take its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.free(sequence.pages)
        sequence.pages = []

    def check_integrity(self) -> None:
        """Pages held by sequences are the pool's used ones, each once. Raises AssertionError."""
        self.pool.check_integrity()
        held = [page for sequence in self.running for page in sequence.pages]
        assert len(held) == len(set(held)) == self.pool.num_used, "pages lost or shared"
        assert not any(sequence.pages for sequence in self.waiting), "a waiting one holds pages"
        assert len(self.running) <= self._config.max_num_seqs, "too many sequences run"

    def _prefilling(self) -> Iterator[Sequence]:
        return (sequence for sequence in self.running if not sequence.is_decoding)

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            num_pages = -(-sequence.request.num_positions // self._config.page_size)
            if num_pages > self.pool.num_free:
                return
            self.waiting.popleft()
            sequence.pages = self.pool.allocate(num_pages)
            self.running.append(sequence)
