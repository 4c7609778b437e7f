"""A step that runs out of memory, or takes too long, and its effect on requests."""

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Span
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.request import FinishReason
from tests.engines import EngineFactory, Preemptions, Result, answer, deployment_of, request
from tests.scripted_model import Script

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
]


class Cramped(Script):
    """A scripted model with memory for only `most` sequences in a step."""

    most = 2
    error: Exception = ERRORS[0]

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Fail if the step has more sequences."""
        if len(spans) > self.most:
            raise self.error
        return super().run(spans)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_step_without_memory_is_tried_again_with_one_fewer(
    engines: EngineFactory, llama_checkpoint: Checkpoint, error: Exception
) -> None:
    """All three requests are answered in the end, because the newest one is preempted."""
    script = Cramped(llama_checkpoint, "hello")
    script.error = error
    observer = Preemptions()
    engine = engines.over(llama_checkpoint, runner=script, observer=observer)
    deployment = deployment_of(llama_checkpoint)
    requests = [request(deployment, [1], max_tokens=5, cache_salt=str(at)) for at in range(3)]
    assert [each.text for each in answer(engine, *requests)] == ["hello"] * 3
    assert observer.num > 0


def test_the_second_failure_in_a_row_fails_the_step_and_not_the_engine(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The newest of four requests was preempted before that failure, so it is answered."""
    script = Cramped(llama_checkpoint, "hello")
    engine = engines.over(llama_checkpoint, runner=script)
    deployment = deployment_of(llama_checkpoint)
    requests = [request(deployment, [1], max_tokens=5, cache_salt=str(at)) for at in range(4)]
    outputs = engine.generate(requests)
    ended = [each[-1].finish_reason for each in outputs]
    assert ended == [FinishReason.ERROR] * 3 + [FinishReason.LENGTH]
    assert outputs[0][-1].error == "out of memory in a step of the engine"
    assert Result.of(outputs[3]).text == "hello"
    assert answer(engine, request(deployment, [1], max_tokens=5))[0].text == "hello"


def test_one_that_needs_too_much_alone_fails_alone(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """A single sequence leaves nothing to preempt, so its request ends with an error."""
    script = Cramped(llama_checkpoint, "hello")
    script.most = 0
    engine = engines.over(llama_checkpoint, runner=script)
    deployment = deployment_of(llama_checkpoint)
    outputs = engine.generate([request(deployment, [1], max_tokens=5)])
    assert outputs[0][-1].finish_reason is FinishReason.ERROR
    script.most = 1
    assert answer(engine, request(deployment, [1], max_tokens=5))[0].text == "hello"


def test_a_memory_error_of_our_own_code_is_a_failure_like_any_other(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """A RuntimeError whose message only resembles torch's fails all requests of the step."""
    script = Cramped(llama_checkpoint, "hello")
    script.error = RuntimeError("out of chalk")
    engine = engines.over(llama_checkpoint, runner=script)
    deployment = deployment_of(llama_checkpoint)
    requests = [request(deployment, [1], max_tokens=5, cache_salt=str(at)) for at in range(3)]
    outputs = engine.generate(requests)
    assert [each[-1].error for each in outputs] == ["RuntimeError in a step of the engine"] * 3


def test_a_long_step_shows_and_a_rest_does_not(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """`seconds_since_step` counts during a long step and is 0 while the engine has no work."""
    script = Script(llama_checkpoint, "x")
    engine = engines.over(llama_checkpoint, runner=script)
    deployment = deployment_of(llama_checkpoint)
    answer(engine, request(deployment, [1], max_tokens=3))
    time.sleep(0.05)
    assert engine.seconds_since_step == 0
    script.delay_s = 0.3
    seen: list[float] = []
    engine.submit(request(deployment, [1], max_tokens=3), lambda _: None)
    deadline = time.monotonic() + 20
    while script.num_calls < 6 and time.monotonic() < deadline:
        seen.append(engine.seconds_since_step)
        time.sleep(0.01)
    assert 0.2 < max(seen) < 2
    later = seen[len(seen) // 2 :]
    assert min(later) < 0.15, "a busy engine has made steps"
