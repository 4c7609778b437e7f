"""The way of a step to its runner: spans from its chunks, then a forward or a launch.

A launch does not wait for the device. The next step can follow it before its tokens are read.

Shapes: R = rows of logits, V = vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, single_rows
from ropewalk.model_runtime.engine.request_state import RequestState, RequestStates
from ropewalk.model_runtime.engine.runner import (
    Launched,
    Runner,
    StepMemoryError,
    memory_errors_told,
)
from ropewalk.model_runtime.runner.step_timer import StepTimer
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence_states import SequenceStates
from ropewalk.model_runtime.scheduling.step_plan import Chunk, StepPlan
from ropewalk.model_runtime.state_shape import StatePart

_IS_MEMORYLESS = attrgetter("is_memoryless")
_UNKNOWN = (0,)  # in the place of a token that only the device has


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step whose tokens are not read yet."""

    plan: StepPlan
    states: Sequence[RequestState]
    launched: Launched


class Launcher:
    """Starts the steps of one engine."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        requests: RequestStates,
        clock: StepTimer,
        before_step: Callable[[], None],
    ) -> None:
        """Keep what a start needs. `before_step` is called before a runner gets a step."""
        self._runner = runner
        self._scheduler = scheduler
        self._states = scheduler.pages.states
        self._requests = requests
        self._clock = clock
        self._before_step = before_step

    def forward(
        self, plan: StepPlan, states: Sequence[RequestState], *, has_drafts: bool
    ) -> Tensor:
        """Run a step, and return the logits [R, V] of its rows. Raises StepMemoryError."""
        with memory_errors_told():  # of a new rotation table
            spans = self._spans(plan, states)
        if has_drafts and self._runner.is_asynchronous:
            spans = single_rows(spans)  # as recorded steps take them
        self._before_step()
        with memory_errors_told():
            forward = self._runner.prepare(spans)
            with self._clock.part("forward"):
                return forward()

    def launch(
        self, plan: StepPlan, states: Sequence[RequestState], before: InFlight | None = None
    ) -> InFlight | None:
        """Launch a step after another launched one, or after one that was read.

        Returns None if the step has to wait: something of it is needed on the host, or a row cannot
        be sampled, and a step that waits finds out which one. Raises StepMemoryError.
        """
        if not self._can_launch(plan, states):
            return None
        self._before_step()
        with self._clock.part("build"), memory_errors_told():
            source = None if before is None else _source(plan, before)
            spans = self._spans(plan, states)
            try:
                rows = [
                    state.sampling_row(chunk.end - len(chunk.sequence.token_ids))
                    for chunk, state in zip(plan.chunks.values(), states, strict=True)
                    if chunk.is_last
                ]
                with self._clock.part("forward"):
                    return InFlight(plan, states, self._runner.launch(spans, rows, source))
            except (RuntimeError, MemoryError):  # of the device
                raise
            except Exception:  # noqa: BLE001  # it comes again in the step that waits
                self._runner.check_device()  # raises if other ranks have begun the step
                return None

    def launch_after(
        self, before: InFlight, num_prefill_tokens: Callable[[int], int]
    ) -> InFlight | None:
        """Launch the step after a launched one; None if it has to be planned anew.

        `num_prefill_tokens`: as `Scheduler.schedule` takes it.
        """
        plan = self._scheduler.following(before.plan, num_prefill_tokens)
        if plan is None:
            return None
        states = [self._requests.of(sequence) for sequence in plan.chunks]
        try:
            return self.launch(plan, states, before)
        except StepMemoryError:
            self._runner.check_device()  # raises if other ranks have begun the step
            return None  # the next step is planned, and runs out of memory, without this one

    def _can_launch(self, plan: StepPlan, states: Sequence[RequestState]) -> bool:
        """Return whether nothing of a step is needed on the host before the next one."""
        # A token of a launched step may be thrown away, and a state cannot go back.
        if not self._runner.is_asynchronous or self._states is not None:
            return False
        if plan.is_decode_only:
            return all(map(_IS_MEMORYLESS, states))
        # Without captured steps, the launch of the next one may take as long as this one runs. The
        # first tokens of prompts would wait for it.
        if not self._runner.is_captured or self._scheduler.restarts_all:
            return False
        return not any(map(_is_awaited, plan.chunks.values(), states))

    def _spans(self, plan: StepPlan, states: Sequence[RequestState]) -> list[Span]:
        return [
            self._span(chunk, state)
            for chunk, state in zip(plan.chunks.values(), states, strict=True)
        ]

    def _span(self, chunk: Chunk, state: RequestState) -> Span:
        sequence, tier = chunk.sequence, chunk.tier
        if state.table[0] is not tier:
            state.table = tier, self._runner.table_id(tier.profile)
        return Span(
            chunk.token_ids or _UNKNOWN,
            chunk.first,
            state.page_row.follow(sequence.pages),
            state.table[1],
            chunk.logit_rows,
            () if self._states is None else self._state_parts(self._states, chunk),
            sequence.tail_page,
        )

    @staticmethod
    def _state_parts(states: SequenceStates, chunk: Chunk) -> Sequence[StatePart]:
        num_drafted = len(chunk.draft)
        return states.parts(chunk.sequence, chunk.num_tokens - num_drafted, num_drafted)


def _is_awaited(chunk: Chunk, state: RequestState) -> bool:
    """Return whether the host needs the logits of a chunk, or its token before the next step."""
    return chunk.is_scored or (chunk.is_last and not state.is_memoryless)


def _source(plan: StepPlan, before: InFlight) -> tuple[Launched, Sequence[int]] | None:
    """Return where the tokens of a plan's decodes are, as `Runner.launch` takes it."""
    sampled = [sequence for sequence, chunk in before.plan.chunks.items() if chunk.is_last]
    rows = {sequence: row for row, sequence in enumerate(sampled)}
    places = [rows[sequence] for sequence, chunk in plan.chunks.items() if chunk.is_decode]
    return (before.launched, places) if places else None
