"""A step that fails, runs out of memory or takes too long, and its effect on requests."""

import gc
import queue
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine import engine as engine_module
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.runner import is_out_of_memory
from ropewalk.model_runtime.errors import EngineStoppedError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Output
from tests.doubles.engines import (
    EngineFactory,
    Preemptions,
    Result,
    answer,
    deployment_of,
    request,
    tiny_checkpoint,
)
from tests.doubles.scripted_model import Script

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
    engines: EngineFactory, llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seconds_since_step` counts during a long step and is 0 while the engine has no work."""
    now = [100.0]
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    script = Script(llama_checkpoint, "x")
    engine = engines.over(llama_checkpoint, runner=script)
    deployment = deployment_of(llama_checkpoint)
    answer(engine, request(deployment, [1], max_tokens=3))
    in_step, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def hold() -> None:
        in_step.release()
        assert may_go_on.acquire(timeout=60)

    script.before_run = hold
    ended = threading.Event()
    engine.submit(
        request(deployment, [1], max_tokens=3),
        lambda output: ended.set() if output.finish_reason else None,
    )
    for _ in range(3):
        assert in_step.acquire(timeout=60)
        assert engine.seconds_since_step == 0, "a busy engine has made steps"
        now[0] += 7.0
        assert engine.seconds_since_step == 7.0
        may_go_on.release()
    assert ended.wait(60)
    while not engine._is_resting:
        threading.Event().wait(0.001)
    now[0] += 50.0
    assert engine.seconds_since_step == 0


ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"


def accelerator_error(text: str = ILLEGAL) -> torch.AcceleratorError:
    """An error as torch makes it from an answer of CUDA."""
    error = torch.AcceleratorError(text)
    error.error_code = 700
    return error


class Broken(Script):
    """A scripted model that fails in its fifth step, and whose device may be broken then."""

    error: Exception = RuntimeError("out of chalk")
    device_error: Exception | None = None

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Fail in the fifth step and in all later ones."""
        if self.num_calls >= 4:
            self.num_calls += 1
            raise self.error
        return super().run(spans)

    def check_device(self) -> None:
        """Fail as CUDA's synchronisation does, if the device is broken."""
        if self.device_error is not None:
            raise self.device_error


@pytest.mark.parametrize(
    ("error", "device_error"),
    [
        (accelerator_error(), accelerator_error()),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
            accelerator_error(),
        ),
        (ValueError("found nothing"), accelerator_error()),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), accelerator_error()),
        (torch.OutOfMemoryError("CUDA out of memory"), accelerator_error()),
    ],
    ids=["accelerator", "cublas", "any, then the device", "triton", "memory, then the device"],
)
def test_a_broken_device_ends_the_engine_after_every_request(
    llama_checkpoint: Checkpoint, error: Exception, device_error: Exception | None
) -> None:
    """Two requests run and one waits; each hears of the end, before the process does."""
    script = Broken(llama_checkpoint, "x")
    script.error, script.device_error = error, device_error
    limits = EngineConfig(kv_cache_tokens=256, max_model_len=64, page_size=16, max_num_seqs=2)
    engine = Engine(script, llama_checkpoint.tokenizer, limits)
    heard: list[Output] = []
    ended: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
    flushed = threading.Event()
    deployment = deployment_of(llama_checkpoint)
    for _ in range(3):
        engine._admission.open()
        engine.submit(request(deployment, [1], max_tokens=40), heard.append)

    def after_step() -> None:
        if not engine.is_running:
            flushed.set()

    def on_death() -> None:
        assert flushed.is_set()
        ended.put([each for each in heard if each.finish_reason is not None])

    engine.start(on_death, after_step)
    last = ended.get(timeout=10)
    assert [(each.finish_reason, each.error) for each in last] == [
        (FinishReason.ERROR, "the engine stopped")
    ] * 3
    assert script.num_calls == 5, "no step may follow on a broken device"
    with pytest.raises(EngineStoppedError):
        engine.submit(request(deployment, [1]), heard.append)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: invalid argument"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"),
    ],
    ids=["accelerator", "cublas"],
)
def test_an_error_of_a_device_that_still_works_ends_its_requests_only(
    engines: EngineFactory, llama_checkpoint: Checkpoint, error: Exception
) -> None:
    """The device is asked, and has no error, so the next request is served."""
    script = Broken(llama_checkpoint, "x")
    script.error = error
    engine = engines.over(llama_checkpoint, runner=script)
    deployment = deployment_of(llama_checkpoint)
    (failed,) = answer(engine, request(deployment, [1], max_tokens=40))
    assert failed.finish_reason is FinishReason.ERROR
    assert engine.is_running
    script.num_calls = 0
    (served,) = answer(engine, request(deployment, [1], max_tokens=3))
    assert served.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (accelerator_error(), False),
        (accelerator_error("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling create"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("The size of tensor a must match the size of tensor b"), False),
        (ValueError("CUDA error: out of memory, a text of ours"), False),
    ],
)
def test_a_shortage_of_a_device_is_told_from_its_other_errors(
    error: Exception, *, is_memory: bool
) -> None:
    """After a shortage the step is retried."""
    assert is_out_of_memory(error) is is_memory


class Panic(BaseException):
    """The kind of exception that a panic in Rust becomes."""


def test_a_panic_ends_the_engine_as_an_error_does(llama_checkpoint: Checkpoint) -> None:
    """A thread that ended in silence would leave its clients waiting."""
    script = Script(llama_checkpoint, "x")

    def panic() -> None:
        raise Panic

    script.before_run = panic
    limits = EngineConfig(kv_cache_tokens=64, max_model_len=64)
    engine = Engine(script, llama_checkpoint.tokenizer, limits)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    died = threading.Event()
    engine.start(died.set)
    engine.submit(request(deployment_of(llama_checkpoint), [1], max_tokens=3), outputs.put)
    assert outputs.get(timeout=10).finish_reason is FinishReason.ERROR
    assert died.wait(10)


def test_nothing_of_a_failed_step_is_alive_at_its_retry(engines: EngineFactory) -> None:
    """Memory runs out between query and key; no garbage is collected."""
    checkpoint = tiny_checkpoint("olmo")  # its decoder is not fused
    attention = checkpoint.model.model.layers[1].self_attn
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if not alive:
            seen.extend(weakref.ref(each) for each in (*inputs, out))

    def fail(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not alive and len(inputs[0][0]) > 20:
            alive.append(sum(each() is not None for each in seen[-2:]))
            raise torch.OutOfMemoryError("CUDA out of memory")

    def count(_: nn.Module, __: tuple[Tensor, ...]) -> None:
        if len(alive) == 1:
            alive.append(sum(each() is not None for each in seen))

    attention.q_proj.register_forward_hook(watch)
    attention.k_proj.register_forward_pre_hook(fail)
    checkpoint.model.model.layers[0].register_forward_pre_hook(count)
    engine = engines.over(checkpoint)
    deployment = deployment_of(checkpoint)
    gc.collect()
    gc.disable()
    try:
        requests = [request(deployment, [7] * 20, max_tokens=2, cache_salt=at) for at in "ab"]
        results = answer(engine, *requests)
    finally:
        gc.enable()
    assert alive == [2, 0]
    assert [each.finish_reason for each in results] == [FinishReason.LENGTH] * 2
