"""The time of a step is measured by part, and the parts add up to the step."""

from collections.abc import Mapping
from typing import Any

import pytest

from ropewalk.model_runtime.engine import choose_tokens
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestStates
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner import step_timer
from ropewalk.model_runtime.runner.step_timer import PARTS, Part, StepTimer
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.text.tokenizer import TokenStream
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.scripted_model import Script


class Times(Observer):
    """An observer that keeps the seconds of each step."""

    def __init__(self) -> None:
        self.steps: list[Mapping[Part, float]] = []

    def timed(self, seconds: Mapping[Part, float]) -> None:
        """Keep one step."""
        self.steps.append(seconds)


class Watch:
    """A clock that only slowed functions move, so pauses of a busy machine are not measured."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The time, in the place of perf_counter."""
        return self._now

    def slow(self, function: Any) -> Any:
        """The same function, which moves the clock by a second first."""

        def later(*arguments: Any, **options: Any) -> Any:
            self._now += 1.0
            return function(*arguments, **options)

        return later


def function_of(part: Part, script: Script) -> tuple[Any, str]:
    """A function that a step calls in this part: its owner, and its name there."""
    functions: dict[Part, tuple[Any, str]] = {
        "schedule": (Scheduler, "schedule"),
        "build": (script, "prepare"),
        "forward": (script, "before_run"),
        "sample": (choose_tokens, "sample_rows"),
        "detokenize": (TokenStream, "push"),
        "deliver": (RequestStates, "note_token"),
    }
    return functions[part]


@pytest.mark.parametrize("part", PARTS)
def test_the_part_that_is_slow_is_the_one_that_shows_it(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    part: Part,
) -> None:
    """Each part is slowed in turn, and the others then take no time."""
    script, watch, observer = Script(llama_checkpoint, "hello"), Watch(), Times()
    monkeypatch.setattr(step_timer, "perf_counter", watch)
    owner, name = function_of(part, script)
    engine = engines.over(llama_checkpoint, runner=script, observer=observer)
    monkeypatch.setattr(owner, name, watch.slow(getattr(owner, name)))
    answer(engine, request(deployment_of(llama_checkpoint), [1], max_tokens=5))
    engine.stop()
    assert len(observer.steps) == 5
    for step in observer.steps:
        assert set(step) == set(PARTS)
        assert min(step.values()) >= 0
        assert step[part] >= 1.0
        assert sum(step.values()) == step[part]


def test_the_parts_are_the_whole_of_a_step(
    engines: EngineFactory, llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is slow: no second of a step counts twice, and none is left out."""
    script, watch, observer = Script(llama_checkpoint, "hello"), Watch(), Times()
    monkeypatch.setattr(step_timer, "perf_counter", watch)
    engine = engines.over(llama_checkpoint, runner=script, observer=observer)
    for part in PARTS:
        owner, name = function_of(part, script)
        monkeypatch.setattr(owner, name, watch.slow(getattr(owner, name)))
    core = engine._core
    own, walls = core.step, []

    def step() -> int:
        began = watch()
        num = own()
        walls.append(watch() - began)
        return num

    core.step = step  # type: ignore[method-assign]
    requests = [request(deployment_of(llama_checkpoint), [1], max_tokens=5) for _ in range(3)]
    answer(engine, *requests)
    engine.stop()
    assert [sum(each.values()) for each in observer.steps] == walls
    assert min(walls) >= len(PARTS)


def test_a_part_inside_another_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts for the innermost part, and the time outside all parts for none."""
    now = iter([1.0, 3.0, 7.0, 15.0, 100.0, 131.0])
    monkeypatch.setattr(step_timer, "perf_counter", lambda: next(now))
    clock = StepTimer()
    with clock.part("build"), clock.part("deliver"):
        pass
    assert clock.take() == {**dict.fromkeys(PARTS, 0.0), "build": 10.0, "deliver": 4.0}
    with clock.part("sample"):
        pass
    assert clock.take() == {**dict.fromkeys(PARTS, 0.0), "sample": 31.0}


def test_a_part_that_fails_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer part counts again after an error inside the inner one."""
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(step_timer, "perf_counter", lambda: next(now))
    clock = StepTimer()
    with (
        clock.part("schedule"),
        pytest.raises(ValueError, match="broken"),
        clock.part("forward"),
    ):
        raise ValueError("broken")
    assert clock.take() == {**dict.fromkeys(PARTS, 0.0), "schedule": 5.0, "forward": 2.0}
