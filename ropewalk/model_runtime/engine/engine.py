"""The engine: one thread that runs steps and reads a queue of commands.

All mutable state belongs to that thread. Other threads count themselves in (`admission.py`), put
commands into the queue, and get outputs through their callbacks.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

import structlog

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.admission import (
    AdmissionQueue,
    Places,
    check_ends,
    check_request,
)
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.engine.runner import Runner
from ropewalk.model_runtime.errors import EngineStoppedError
from ropewalk.model_runtime.request import OnOutput, Output, Request
from ropewalk.model_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # without a lower store, nothing of it is imported
    from ropewalk.model_runtime.engine.kv_disk.lower_store import LowerStore

STOPPED = "the engine stopped"
_LAST_WRITES_S = 5.0  # for pages that are not on disk when the engine stops

_log = structlog.get_logger(__name__)


class Engine:
    """The serving engine. The calls are `start`, `submit`, `abort` and `stop`."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        eos_token_ids: frozenset[int] = frozenset(),
        observer: Observer | None = None,
        *,
        lower_store: "LowerStore | None" = None,
    ) -> None:
        """Build an engine that has not started. `lower_store`: None: none."""
        self._admission = AdmissionQueue(config)
        ended = self._admission.ended
        self._core = EngineCore(runner, config, observer or Observer(), ended, lower_store)
        self._tokenizer = tokenizer
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._fault: str | None = None  # something outside of the engine that must end it
        self._is_stuck = False  # its thread never ends
        self._is_resting = True  # no request is live: the thread waits for a command
        self._last_step = time.monotonic()  # when the last step or wait ended
        self._on_death: Callable[[], None] = lambda: None
        self._after_step: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def is_running(self) -> bool:
        return self._admission.is_open

    @property
    def seconds_since_step(self) -> float:
        return 0.0 if self._is_resting else time.monotonic() - self._last_step

    def start(
        self,
        on_death: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        The thread calls `on_death` if it ends because of an error. It calls `after_step` when all
        outputs of a step have been delivered, and after the last outputs when it ends.
        """
        self._on_death, self._after_step = on_death, after_step
        self._admission.open()
        self._core.start_lower_store(lambda: self._commands.put(lambda: None))
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the thread after its current step, and end every request with an error."""
        self._admission.close()
        self._commands.put(lambda: None)  # wakes the thread
        if self._thread.is_alive() and not self._is_stuck:
            self._thread.join(timeout_s)

    def fail(self, reason: str, patience_s: float = 0.5) -> None:
        """End the engine because of something outside of it, as an error in its thread would.

        For any thread but the engine's. If that one hangs in a step, then this one ends the
        requests in its place.
        """
        self._fault = reason
        self._commands.put(lambda: None)  # wakes the thread
        if not self._thread.is_alive():  # it ends as soon as it starts, or has ended
            return
        self._thread.join(patience_s)
        if self._thread.is_alive():
            _log.error("engine_stuck", reason=reason)
            self._is_stuck = True
            self._admission.close()
            self._core.fail_all(STOPPED)
            self._after_step()
            self._on_death()

    def reserve(self, num: int) -> AbstractContextManager[Places]:
        """Reserve places for requests before they are parsed; submit them inside the block.

        Raises QueueFullError, RequestError or EngineStoppedError at once if there are none.
        """
        return self._admission.reserve(num)

    def submit(self, request: Request, on_output: OnOutput) -> None:
        self.submit_all([(request, on_output)])

    def submit_all(
        self,
        requests: Sequence[tuple[Request, OnOutput]],
        arrived: float | None = None,
        places: Places | None = None,
    ) -> None:
        """Queue requests, all or none; they fill `places` if it is given.

        The engine's thread passes the outputs of a request to its callback. The last output has a
        finish_reason.
        `arrived`: time.monotonic() when the client sent the requests, if earlier than now.
        Raises RequestError, QueueFullError or EngineStoppedError, and then calls no callback.
        """
        states = []
        for request, on_output in requests:
            check_request(request, self._config)
            state = RequestState.of(request, self._tokenizer, self._eos_token_ids, on_output)
            check_ends(request, state.answer.end_ids)
            if arrived is not None:
                state.arrived = arrived
            states.append(state)
        num_prompt_tokens = sum(len(request.prompt_ids) for request, _ in requests)
        self._admission.submit(
            len(states),
            num_prompt_tokens,
            places,
            lambda: self._commands.put(lambda: self._add(states)),
        )

    def abort(self, request_id: str) -> None:
        self._commands.put(lambda: self._core.abort(request_id))

    def generate(self, requests: Sequence[Request]) -> list[list[Output]]:
        """Serve requests together and wait; for scripts and tests, not for the server."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        outputs: list[list[Output]] = [[] for _ in requests]

        def collector(into: list[Output]) -> OnOutput:
            def collect(output: Output) -> None:
                into.append(output)
                if output.finish_reason is not None:
                    done.put(None)

            return collect

        self.submit_all(
            [(each, collector(into)) for each, into in zip(requests, outputs, strict=True)]
        )
        for _ in requests:
            done.get()
        return outputs

    def _add(self, states: Sequence[RequestState]) -> None:
        for state in states:
            self._core.add(state)

    def _loop(self) -> None:
        has_died = False
        try:
            while self._admission.is_open:
                self._take_commands()
                self._check_fault()
                if self._admission.is_open:
                    self._core.step()
                    if self._config.max_queued_prompt_tokens is not None:
                        self._admission.note_waiting(self._core.num_waiting_tokens)
                    self._after_step()
                    self._last_step = time.monotonic()
        except BaseException:  # noqa: BLE001  # a panic of a tokenizer's Rust is no Exception
            _log.exception("engine_died")
            has_died = True
        try:
            self._end_all()  # before the process ends, all clients must hear of it
        finally:
            if has_died:
                self._on_death()

    def _end_all(self) -> None:
        """End every request with an error."""
        self._admission.close()
        self._take_waiting_commands()
        self._core.fail_all(STOPPED)
        self._after_step()  # clients hear of it even if the device never answers
        self._drain()
        self._core.close_lower_store(_LAST_WRITES_S)
        self._core.update_gauges()

    def _drain(self) -> None:
        try:
            self._core.drain()
        except Exception:  # noqa: BLE001  # the device may be what ended the engine
            _log.exception("launched_step_failed")

    def _take_commands(self) -> None:
        """Run all queued commands; if no request is live, wait for a command first."""
        if self._core.is_idle:
            self._core.update_gauges()
            self._is_resting = True
            command = self._commands.get()
            self._last_step = time.monotonic()
            self._is_resting = False
            command()
        elif (patience_s := self._core.patience_s) is not None:
            with suppress(queue.Empty):
                self._commands.get(timeout=patience_s)()
        self._take_waiting_commands()

    def _check_fault(self) -> None:
        """Raise EngineStoppedError if something outside of the engine must end it."""
        if self._fault is not None:
            raise EngineStoppedError(self._fault)

    def _take_waiting_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()
