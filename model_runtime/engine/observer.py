"""What the engine tells whoever keeps the metrics. Times are seconds of a monotonic clock."""

from collections.abc import Mapping

from model_runtime.request import FinishReason, Request
from model_runtime.runner.step_timer import Part
from rope import Tier


class Observer:
    """Listens to nothing; override what you need. Called on the engine's thread, in order."""

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """A request left the queue for the first time; so many of its tokens were cached."""

    def preempted(self, request: Request) -> None:
        """A request lost its pages to one that arrived earlier, and waits again."""

    def nan_aborted(self, request: Request) -> None:
        """A request ended because the model answered it with NaN or Inf."""

    def rescaled(self, request: Request) -> None:
        """A growing request moved to a higher tier."""

    def first_token(self, request: Request, seconds: float, prefill_seconds: float) -> None:
        """The first token is there: since arrival, and since it left the queue."""

    def next_token(self, request: Request, context_len: int, seconds: float) -> None:
        """Another token is there, `seconds` after the last; the sequence has `context_len`."""

    def finished(
        self, request: Request, tier: Tier, reason: FinishReason, num_generated: int, seconds: float
    ) -> None:
        """A request ended on a tier, `seconds` after it arrived."""

    def stepped(self, num_running: int, num_waiting: int, num_used_pages: int) -> None:
        """A step ended, or the queues changed without one."""

    def timed(self, seconds: Mapping[Part, float]) -> None:
        """A step that computed something took so long in each of its parts, all of them named."""
