"""The interface of the routes to an engine: one in this process, or those of several replicas."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from model_runtime.config import EngineConfig
from model_runtime.engine.admission import Places
from model_runtime.errors import CacheCapacityError, RequestError
from model_runtime.request import OnOutput, Request
from model_runtime.scheduling.kept_pages import most_pages


class EngineClient(Protocol):
    """Takes requests and delivers their outputs; `Engine` documents each call."""

    @property
    def config(self) -> EngineConfig:
        """Return the engine's limits."""

    @property
    def is_running(self) -> bool:
        """Return whether requests can be submitted."""

    @property
    def is_ready(self) -> bool:
        """Return whether a request would be served now."""

    @property
    def seconds_since_step(self) -> float:
        """Return the duration of the current step so far; 0 while the engine is idle."""

    def start(
        self,
        on_death: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Accept requests from now on."""

    def stop(self, timeout_s: float = 30.0) -> None:
        """End every request with an error."""

    def reserve(self, num: int) -> AbstractContextManager[Places]:
        """Reserve places for requests before they are parsed."""

    def submit_all(
        self,
        requests: Sequence[tuple[Request, OnOutput]],
        arrived: float | None = None,
        places: Places | None = None,
    ) -> None:
        """Queue requests, all or none."""

    def abort(self, request_id: str) -> None:
        """End a request; no effect if it has already ended."""


def problem_of(engine: EngineClient, stall_seconds: float) -> str | None:
    """Return the reason that an engine cannot serve, or None.

    `stall_seconds`: the longest time that a step may take.
    """
    if not engine.is_running:
        return "The engine is not running."
    seconds = engine.seconds_since_step
    if seconds > stall_seconds:
        return f"The engine has made no step for {seconds:.0f} s."
    return None


def check_request(request: Request, config: EngineConfig) -> None:
    """Raise RequestError for a request that an engine with this config can never serve."""
    if not request.prompt_ids:
        raise RequestError("The prompt must have at least one token.", param="prompt")
    num_positions = request.num_positions
    capacity = config.num_pages * config.page_size
    most = most_pages(request.placement, config.page_size, config.max_num_batched_tokens)
    if most is not None:
        num_positions = min(num_positions, most * config.page_size)
    if num_positions > capacity:
        raise CacheCapacityError(
            f"The request needs {num_positions} positions, the KV cache holds {capacity} in "
            "all (kv_cache_tokens).",
            param="prompt",
            code="kv_cache_exceeded",
            details={"n_positions": num_positions, "kv_cache_tokens": capacity},
        )
