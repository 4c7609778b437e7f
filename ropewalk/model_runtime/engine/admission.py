"""Admission to the engine: the queue's limits, and places reserved while a request is parsed.

A request counts from its submission to its last output. Requests that can start at once do not
count as waiting, so the number that waits is what exceeds `max_num_seqs`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.errors import (
    CacheCapacityError,
    EngineStoppedError,
    QueueFullError,
    RequestError,
)
from ropewalk.model_runtime.request import Request
from ropewalk.model_runtime.scheduling.sequence import most_pages

if TYPE_CHECKING:
    from ropewalk.model_runtime.engine.engine import Engine


@dataclass(slots=True)
class Places:
    """Places in the queue that are reserved and not filled yet."""

    num: int


class AdmissionQueue:
    """The counts of requests in the engine, and their limits. Every method is thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()  # guards all below
        self._is_open = False
        self._num_submitted = 0  # requests without their last output
        self._num_reserved = 0  # places of requests that are still being parsed
        self._num_waiting_tokens = 0  # prompt tokens of the requests that wait

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        with self._lock:
            self._is_open = False

    @contextmanager
    def reserve(self, num: int) -> Iterator[Places]:
        """Reserve places within the block; `submit` fills them.

        Raises QueueFullError, RequestError or EngineStoppedError at once if there are none.
        """
        with self._lock:
            self._check_open()
            self._check_room(num)
            self._num_reserved += num
        places = Places(num)
        try:
            yield places
        finally:
            with self._lock:
                self._num_reserved -= places.num

    def submit(
        self, num: int, num_prompt_tokens: int, places: Places | None, enqueue: Callable[[], None]
    ) -> None:
        """Count requests and call `enqueue`; they fill `places` if it is given.

        `enqueue` runs under the lock, so nothing is queued after `close`. Raises QueueFullError,
        RequestError or EngineStoppedError, and then calls nothing.
        """
        with self._lock:
            self._check_open()
            self._check_tokens(num_prompt_tokens)
            if places is None:
                self._check_room(num)
            else:
                assert places.num == num
                self._num_reserved -= places.num
                places.num = 0
            self._num_submitted += num
            enqueue()

    def ended(self) -> None:
        """Count out a request, before its last output is delivered."""
        with self._lock:
            self._num_submitted -= 1

    def note_waiting(self, num_prompt_tokens: int) -> None:
        """Set the number of prompt tokens that wait; the engine's thread knows it."""
        with self._lock:
            self._num_waiting_tokens = num_prompt_tokens

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineStoppedError("The engine is not running.")

    def _check_room(self, num_new: int) -> None:
        max_running, max_queued = self._config.max_num_seqs, self._config.max_queued_requests
        max_requests = max_running + max_queued
        if num_new > max_requests:
            raise RequestError(
                f"The request wants {num_new} answers (prompts x n); the server accepts at most "
                f"{max_requests} at once (max_num_seqs + max_queued_requests).",
                param="n",
                code="too_many_answers",
            )
        num_waiting = self._num_submitted + self._num_reserved - max_running
        if num_waiting + num_new > max_queued:
            raise QueueFullError(
                f"{max(num_waiting, 0)} requests are waiting; at most "
                f"{max_queued} may (max_queued_requests)."
            )

    def _check_tokens(self, num_new: int) -> None:
        limit, num_waiting = self._config.max_queued_prompt_tokens, self._num_waiting_tokens
        if limit is None:
            return
        # An empty queue accepts a prompt of any length.
        if num_waiting and num_waiting + num_new > limit:
            raise QueueFullError(
                f"{num_waiting} prompt tokens are waiting; with these {num_new} they would be "
                f"more than {limit} (max_queued_prompt_tokens)."
            )


def problem_of(engine: "Engine", stall_seconds: float) -> str | None:
    """Return the reason that an engine cannot serve, or None.

    `stall_seconds`: the longest time that a step may take.
    """
    if not engine.is_running:
        return "The engine is not running."
    seconds = engine.seconds_since_step
    if seconds > stall_seconds:
        return f"The engine has made no step for {seconds:.0f} s."
    return None


def check_ends(request: Request, end_ids: frozenset[int]) -> None:
    """Raise RequestError if no token may come before min_tokens. `end_ids`: of the request."""
    sampling = request.sampling
    if not sampling.min_tokens or sampling.allowed is None:
        return
    allowed = int.from_bytes(sampling.allowed, "little")
    if not allowed & ~sum(1 << token_id for token_id in end_ids):
        raise RequestError(
            "`min_tokens` must be 0, because each of `allowed_token_ids` ends the answer. Given: "
            f"{sampling.min_tokens}",
            param="min_tokens",
        )


def check_request(request: Request, config: EngineConfig) -> None:
    """Raise RequestError for a request that an engine with this config can never serve."""
    if not request.prompt_ids:
        raise RequestError("The prompt must have at least one token.", param="prompt")
    num_positions = request.num_positions
    most = most_pages(request.tier_choice, config.page_size, config.max_num_batched_tokens)
    num_pages = config.num_held_pages(num_positions, most)
    if num_pages <= config.num_pages:
        return
    if most is not None:
        num_positions = min(num_positions, most * config.page_size)
    text = f"{num_positions} positions, the KV cache has {config.capacity} in all"
    if config.page_groups.has_windows:
        text = (
            f"{num_positions} positions, which take {num_pages} pages of layers, the KV cache has "
            f"{config.num_pages}"
        )
    raise CacheCapacityError(
        f"The request needs {text} (kv_cache_tokens).",
        param="prompt",
        code="kv_cache_exceeded",
        details={"n_positions": num_positions, "kv_cache_tokens": config.capacity},
    )
