"""What the engine tells whoever keeps the metrics. Times are seconds of a monotonic clock."""

from model_runtime.request import FinishReason, Request


class Observer:
    """Listens to nothing; override what you need. Called on the engine's thread, in order."""

    def started(self, request: Request, queue_seconds: float) -> None:
        """A request left the queue and has its pages."""

    def first_token(self, request: Request, seconds: float, prefill_seconds: float) -> None:
        """The first token is there: since arrival, and since it left the queue."""

    def next_token(self, request: Request, context_len: int, seconds: float) -> None:
        """Another token is there, `seconds` after the last; the sequence has `context_len`."""

    def finished(
        self, request: Request, reason: FinishReason, num_generated: int, seconds: float
    ) -> None:
        """A request ended, `seconds` after it arrived."""

    def stepped(self, num_running: int, num_waiting: int, num_used_pages: int) -> None:
        """A step ended, or the queues changed without one."""
