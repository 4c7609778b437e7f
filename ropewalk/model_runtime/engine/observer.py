"""The engine's callbacks for metrics. Times are seconds of a monotonic clock."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.model_runtime.runner.step_timer import Part
from ropewalk.rope import Tier

if TYPE_CHECKING:  # without a lower store, nothing of it is imported
    from ropewalk.model_runtime.engine.kv_disk.counts import StoreCounts


class Observer:
    """A base class of callbacks that do nothing. The engine's thread calls them in order."""

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Record the first start of a request, with its cached tokens and its queue time."""

    def missed(self, request: Request, num_tokens: int) -> None:
        """Record prompt tokens that the cache had at the start, under other tables only."""

    def preempted(self, request: Request) -> None:
        """Record that a request lost its pages to an earlier one, and waits again."""

    def nan_aborted(self, request: Request) -> None:
        """Record that a request ended because its logits had NaN or Inf."""

    def rescaled(self, request: Request) -> None:
        """Record that a growing request moved to a higher tier."""

    def first_token(self, request: Request, seconds: float, prefill_seconds: float) -> None:
        """Record the first token, with the seconds since arrival and since leaving the queue."""

    def next_token(self, request: Request, context_len: int, seconds: float) -> None:
        """Record another token, `seconds` after the last; `context_len`: tokens so far."""

    def speculated(self, num_drafted: int, num_accepted: int) -> None:
        """Record the tokens of a draft that a step computed, and those that were chosen."""

    def finished(
        self, request: Request, tier: Tier, reason: FinishReason, num_generated: int, seconds: float
    ) -> None:
        """Record that a request ended on a tier, `seconds` after it arrived."""

    def stepped(
        self, num_running: int, num_waiting: int, num_waiting_tokens: int, num_used_pages: int
    ) -> None:
        """Record the queues and the cache after a step, or after another change of them."""

    def states_held(self, num_used_slots: int) -> None:
        """Record the slots that hold states of running sequences, after `stepped`."""

    def timed(self, seconds: Mapping[Part, float]) -> None:
        """Record the seconds of every part of a step that computed tokens."""

    def pages_stored(self, counts: "StoreCounts") -> None:
        """Record what the lower store did since the last call, and its state."""
