"""The engine without its thread: requests in, steps, outputs out.

A step is scheduled, runs, and its logits are processed (`postprocess.py`). Nothing here is
thread-safe.

A device that runs asynchronously stays one step ahead where it can (`launcher.py`). The step after
the current one is launched before the tokens of the current one are read. They go from step to step
on the device. The host delivers them while the device computes the next ones. If drafts are
expected, then the tokens are read first (`speculator.py`).
"""

import time
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import structlog

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.launcher import InFlight, Launcher
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.postprocess import Postprocessor
from ropewalk.model_runtime.engine.request_state import RequestState, RequestStates
from ropewalk.model_runtime.engine.runner import Runner, StepMemoryError
from ropewalk.model_runtime.engine.speculator import RightDrafts, Speculator
from ropewalk.model_runtime.request import FinishReason, Output
from ropewalk.model_runtime.runner.step_timer import StepTimer
from ropewalk.model_runtime.scheduling.prefill_budget import PrefillBudget
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.step_plan import StepPlan

if TYPE_CHECKING:  # without a lower store, nothing of it is imported
    from ropewalk.model_runtime.engine.kv_disk.lower_store import LowerStore

_log = structlog.get_logger(__name__)
_IS_PLAIN = attrgetter("is_plain")


class EngineCore:
    """The owner of every live request."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        observer: Observer,
        on_end: Callable[[], None] = lambda: None,
        lower_store: "LowerStore | None" = None,
    ) -> None:
        """Build a core without requests. `on_end` is called before a last output is delivered.

        `lower_store`: None: evicted pages are lost.
        """
        self._runner = runner
        self._observer = observer
        self._clock = StepTimer()
        self.scheduler = Scheduler(config)
        self._states = self.scheduler.pages.states
        self._prefill_budget = PrefillBudget(
            config.step_target_s,
            config.max_num_batched_tokens,
            follows_decodes=config.step_target_follows,
        )
        self._requests = RequestStates(self.scheduler, observer, on_end)
        right_drafts = None
        if self._states is not None:
            right_drafts = RightDrafts(self._states, runner, self._clock)
        self._postprocessor = Postprocessor(
            self._requests, self.scheduler, observer, self._clock, right_drafts
        )
        self._is_retrying = False  # the previous step ran out of memory
        self._launcher = Launcher(
            runner, self.scheduler, self._requests, self._clock, self._prepare_lower_store
        )
        self._in_flight: InFlight | None = None  # launched before the last tokens were read
        self._lower_store = lower_store
        self._computes = False  # the last step had a sequence
        self._speculator = Speculator.of(runner, config, self.scheduler.pages, observer)

    @property
    def is_idle(self) -> bool:
        return not self._requests and self._in_flight is None

    @property
    def num_waiting_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens

    @property
    def patience_s(self) -> float | None:
        """Return how long to wait for the lower store before the next step; None: not at all."""
        if self._lower_store is None or self._computes or not self._lower_store.num_awaited:
            return None
        return self._lower_store.patience_s

    def start_lower_store(self, wake: Callable[[], None]) -> None:
        """Start the lower store's threads, if there is one; they call `wake` when there is news."""
        if self._lower_store is not None:
            self._lower_store.start(self.scheduler.pages, wake)

    def close_lower_store(self, timeout_s: float) -> None:
        """Let the lower store write what it has noted, for so long at most."""
        if self._lower_store is not None:
            self._lower_store.close(timeout_s)
            self._step_lower_store()

    def _step_lower_store(self) -> None:
        """Let the lower store copy pages, and report what it did."""
        if self._lower_store is None:
            return
        counts = self._lower_store.stepped(is_busy=not self.is_idle)
        if counts is not None:
            self._observer.pages_stored(counts)

    def _prepare_lower_store(self) -> None:
        """Let the next step wait for copies that it could disturb."""
        if self._lower_store is not None:
            self._lower_store.before_step()

    def add(self, state: RequestState) -> None:
        self._requests.add(state)

    def abort(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            self._requests.deliver(state, Output(finish_reason=FinishReason.ABORT))

    def fail_all(self, error: str) -> None:
        for state in self._requests.all():
            self._requests.fail(state, error)

    def drain(self) -> None:
        """Wait for a launched step, and discard its tokens."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._read(in_flight)

    def step(self) -> int:
        """Run one step, or read one that was launched; return the number of its sequences.

        If a step fails, then only its own sequences fail. If it runs out of memory, then the
        newest sequence is preempted and the step is retried once. Raises if the device is broken.
        """
        with self._clock.part("schedule"):
            self._requests.end_overdue(time.monotonic())
            plan = self._plan() if self._in_flight is None else self._in_flight.plan
            is_done = bool(plan.chunks) and self._run_or_fail(plan)
            if not plan.chunks:  # those of the retry have left
                self._is_retrying = False
            self._computes = bool(plan.chunks)
            with self._clock.part("deliver"):
                if self._states is not None:
                    self._states.free_draft_slot()
                self.update_gauges()
                self._step_lower_store()
        seconds = self._clock.take()
        if plan.chunks:
            self._observer.timed(seconds)
        if self._speculator is not None:
            self._speculator.learn(plan, seconds if is_done else None)
        if is_done:
            num_prefill = plan.num_prefill_tokens
            self._prefill_budget.note(num_prefill, sum(seconds.values()), plan.num_decode_rows)
            if self._lower_store is not None:
                self._lower_store.computed(num_prefill, sum(seconds.values()))
        return len(plan.chunks)

    def update_gauges(self) -> None:
        """Report the sizes of the queues and the pages in use."""
        scheduler = self.scheduler
        self._observer.stepped(
            len(scheduler.running),
            len(scheduler.waiting),
            self.num_waiting_tokens,
            scheduler.pool.num_used,
        )
        if self._states is not None:
            self._observer.states_held(self._states.pool.num_used)

    def check_integrity(self) -> None:
        """Check that the live requests are those of the scheduler. Raises AssertionError."""
        self.scheduler.check_integrity()
        known = [*self.scheduler.running, *self.scheduler.waiting]
        live = self._requests.all()
        assert {id(state.sequence) for state in live} == {id(each) for each in known}

    def _plan(self) -> StepPlan:
        plan = self.scheduler.schedule(
            starts_waiting=not self._is_retrying,
            num_prefill_tokens=self._prefill_budget.num_tokens,
        )
        self._note_plan(plan)
        if self._speculator is not None and plan.is_decode_only and not self._is_retrying:
            self._speculator.add_drafts(plan, self._requests)
        return plan

    def _run_or_fail(self, plan: StepPlan) -> bool:
        """Run a plan; return False if it failed. Its sequences have ended then, or are retried."""
        try:
            self._run(plan)
        except StepMemoryError:
            self._wait_for_device()
            self._prefill_budget.note_failure(plan.num_prefill_tokens)
            self._is_retrying = not self._is_retrying and self._make_room()
            if not self._is_retrying:
                self._fail(plan, "out of memory in a step of the engine")
            return False
        except Exception as error:  # noqa: BLE001  # it is logged, and ends its requests
            # On a broken device all later steps fail, too, so the engine must end. Only the device
            # can tell, because CUDA reports a mere wrong argument with the same kind of error.
            self._wait_for_device()
            _log.exception("step_failed", num_sequences=len(plan.chunks))
            self._fail(plan, f"{type(error).__name__} in a step of the engine")
            return False
        self._is_retrying = False
        return True

    def _wait_for_device(self) -> None:
        """Wait after a failed step, and release the pages of a launched step that nothing reads."""
        self._runner.check_device()
        self.scheduler.pages.release_detained()

    def _run(self, plan: StepPlan) -> None:
        if self._in_flight is not None:
            self._finish(self._in_flight)
            return
        with self._clock.part("build"):
            states = [self._requests.of(sequence) for sequence in plan.chunks]
            has_drafts = self._speculator is not None and self._speculator.has_drafts
            launched = None if has_drafts else self._launcher.launch(plan, states)
            if launched is None:
                logits_RV = self._launcher.forward(plan, states, has_drafts=has_drafts)
        if launched is not None:
            self._finish(launched)
        elif has_drafts:
            at_once, chunks = self._runner.is_asynchronous, list(plan.chunks.values())
            self._postprocessor.process_drafts(chunks, logits_RV, at_once=at_once)
        elif plan.is_decode_only and all(map(_IS_PLAIN, states)):
            self._postprocessor.process_decodes(states, logits_RV)
        else:
            self._postprocessor.process(plan.chunks.values(), states, logits_RV)

    def _finish(self, current: InFlight) -> None:
        """Launch the step after a launched one, then read and deliver the tokens of that one."""
        self._in_flight = following = None
        if not self._expects_drafts(current):
            num_tokens = self._prefill_budget.num_tokens
            following = self._launcher.launch_after(current, num_tokens)
        is_finite_R, token_ids = self._read(current)
        if following is not None:
            # If a sequence ends now, the device still computes tokens of it, which are not read.
            self.scheduler.pages.detain()
            self._in_flight = following
            self._note_plan(following.plan)
        self._postprocessor.process_launched(current.plan, current.states, is_finite_R, token_ids)

    def _expects_drafts(self, current: InFlight) -> bool:
        """Return whether the step after a launched one needs its tokens, to check drafts."""
        speculator = self._speculator
        return speculator is not None and speculator.expects_drafts(current.plan, self._requests)

    def _read(self, in_flight: InFlight) -> tuple[list[bool], list[int]]:
        """Wait for a launched step, after which no page has to be detained."""
        try:
            with self._clock.part("sample"):
                return in_flight.launched.read()
        finally:
            self.scheduler.pages.release_detained()

    def _make_room(self) -> bool:
        """Preempt sequences; return False if fewer than two run."""
        preempted = self.scheduler.make_room()
        for sequence in preempted:
            _log.warning("out_of_memory", preempted=sequence.request.request_id)
            self._observer.preempted(sequence.request)
        return bool(preempted)

    def _fail(self, plan: StepPlan, error: str) -> None:
        for sequence in plan.chunks:
            state = self._requests.get(sequence.request.request_id)
            if state is not None:  # None: it ended before the step failed
                self._requests.fail(state, error)

    def _note_plan(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for sequence in plan.preempted:
            self._observer.preempted(sequence.request)
        for sequence in plan.rescaled:
            self._observer.rescaled(sequence.request)
        for sequence, chunk in plan.chunks.items():
            if not chunk.is_decode:
                self._requests.note_start(self._requests.of(sequence), now)
