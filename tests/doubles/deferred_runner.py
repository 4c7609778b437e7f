"""A device that runs a launched step only when the host waits for it, and an engine over it."""

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Output, Request
from ropewalk.model_runtime.runner.launched_step import LaunchedStep
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.sampler import SamplingRow
from ropewalk.model_runtime.scheduling.page_pool import PagePool
from ropewalk.rope import Profile
from tests.doubles.engines import Result

CONFIG = EngineConfig(
    kv_cache_tokens=30 * 8,
    max_model_len=256,
    page_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=48,
)
END = frozenset({7, 11, 40, 41})  # of 199 tokens, so that some answers end by themselves


@dataclass(eq=False)
class Deferred:
    """The handle of a launched step."""

    runner: "DeferredRunner"
    work: Callable[[], LaunchedStep]
    has_prompt: bool
    result: LaunchedStep | None = None

    def read(self) -> tuple[list[bool], list[int]]:
        """Run all steps up to this one, and return what it computed."""
        self.runner.run_until(self)
        assert self.result is not None
        return self.result.read()


@dataclass(eq=False)
class DeferredRunner:
    """Runs steps in the order of a stream, and as late as a device may.

    The inputs are copied at the launch, as they are on their way to a device.
    """

    runner: ModelRunner
    pool: PagePool | None = None  # checked if given: pages of a step are held until it has run
    num_followed: int = 0  # steps launched before the tokens of the step before were read
    num_prompts_followed: int = 0  # those of them after a step with prompts
    num_prompts_ahead: int = 0  # those of them with prompts
    fails_to_launch: Exception | None = None  # of the next step that follows another
    fails_to_read: Exception | None = None
    spoils: Callable[[Sequence[Span]], None] = lambda _: None  # called before a step computes
    queue: deque[Deferred] = field(default_factory=deque)
    is_asynchronous: bool = True
    is_captured: bool = True
    most_draft_rows: int = 16  # whose bits do not depend on their number

    def table_id(self, profile: Profile) -> int:
        """Return the rotation table of the real runner."""
        return self.runner.table_id(profile)

    def prepare(self, spans: Sequence[Span]) -> Callable[[], Tensor]:
        """Prepare a step that runs at once, after all that were launched."""
        self.run_until(None)
        return self.runner.prepare(spans)

    def check_device(self) -> None:
        """Run all launched steps, as a wait for the device does."""
        self.run_until(None)

    def launch(self, spans: Sequence[Span], rows: Sequence[SamplingRow], before: Any) -> Deferred:
        """Queue a step."""
        has_prompt = any(len(each.token_ids) > 1 or not each.logit_rows for each in spans)
        if self.queue:
            if self.fails_to_launch is not None:
                error, self.fails_to_launch = self.fails_to_launch, None
                raise error
            self.num_followed += 1
            self.num_prompts_followed += self.queue[-1].has_prompt
            self.num_prompts_ahead += has_prompt
        held = [each._replace(pages=np.array(each.pages)) for each in spans]
        kept = deepcopy(list(rows))

        def work() -> LaunchedStep:
            for span in held:
                if self.pool is not None:
                    assert all(self.pool.ref_counts[page] > 0 for page in span.pages)
            self.spoils(held)
            where = None if before is None else (before[0].result, before[1])
            return self.runner.launch(held, kept, where)

        self.queue.append(Deferred(self, work, has_prompt))
        return self.queue[-1]

    def run_until(self, last: Deferred | None) -> None:
        """Run the queued steps up to one of them; None: all."""
        while self.queue and (last is None or last.result is None):
            if self.fails_to_read is not None:
                error, self.fails_to_read = self.fails_to_read, None
                self.queue.clear()
                raise error
            step = self.queue.popleft()
            step.result = step.work()


def core_of(
    checkpoint: Checkpoint,
    *,
    is_ahead: bool,
    max_draft_tokens: int = 0,
    observer: Observer | None = None,
    **limits: Any,
) -> EngineCore:
    """A core over the real model; `limits`: fields of the config."""
    config = replace(CONFIG, max_draft_tokens=max_draft_tokens, **limits)
    runner = build_runner(checkpoint, config)
    device = DeferredRunner(runner) if is_ahead else runner
    core = EngineCore(device, config, observer or Observer())
    if is_ahead:
        device_of(core).pool = core.scheduler.pool
    return core


def device_of(core: EngineCore) -> DeferredRunner:
    """The device of a core that is ahead."""
    runner = core._runner
    assert isinstance(runner, DeferredRunner)
    return runner


class Answers:
    """The outputs of each request."""

    def __init__(self, core: EngineCore, checkpoint: Checkpoint) -> None:
        self.core, self.checkpoint = core, checkpoint
        self.outputs: dict[str, list[Output]] = {}

    def add(self, *requests: Request) -> None:
        """Queue requests."""
        for each in requests:
            got = self.outputs[each.request_id] = []
            state = RequestState.of(each, self.checkpoint.tokenizer, END, got.append)
            self.core.add(state)

    def finish(self) -> None:
        """Step until the core is idle; everything must be free then."""
        for _ in range(2000):
            if self.core.is_idle:
                break
            self.core.step()
            self.core.check_integrity()
        assert self.core.is_idle
        assert self.core.scheduler.pool.num_used == 0

    def results(self) -> dict[str, Result]:
        """The whole answers; each has one last output."""
        for outputs in self.outputs.values():
            assert [each.finish_reason is not None for each in outputs].count(True) == 1
            assert outputs[-1].finish_reason is not None
        return {name: Result.of(outputs) for name, outputs in self.outputs.items()}
