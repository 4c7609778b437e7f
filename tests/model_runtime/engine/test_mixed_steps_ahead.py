"""Steps with prompts are launched ahead, and every request gets what a waiting engine gives it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.paged_attention import STEP
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.layers.last_layer import PrunedContext
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.model_runtime.runner import step_timer
from tests.doubles.deferred_runner import Answers, Deferred, core_of, device_of
from tests.doubles.engines import deployment_of, request
from tests.doubles.random_workloads import Workload, check, serve, workload

NUM_SHARED = (1, 40, 70, 110)
# Prompts in chunks, and so few pages that requests preempt each other.
LIMITS = {"max_num_batched_tokens": 24, "kv_cache_tokens": 25 * 8}
POISON = 30  # a token that some prompts end with, and some answers have


class Seen(Observer):
    """Counts what a workload should meet."""

    def __init__(self) -> None:
        self.num_preempted = self.num_rescaled = self.num_shared = self.num_nan = 0

    def preempted(self, request: Request) -> None:
        """Count a preemption."""
        self.num_preempted += 1

    def rescaled(self, request: Request) -> None:
        """Count a tier change."""
        self.num_rescaled += 1

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Count a start with pages of others."""
        self.num_shared += num_cached_tokens > 0

    def nan_aborted(self, request: Request) -> None:
        """Count a row that is not finite."""
        self.num_nan += 1


@contextmanager
def poisoned(model: nn.Module) -> Iterator[None]:
    """Let the row of one token be not finite, in every step that needs its logits."""

    def spoil(_: nn.Module, args: Any, named: Any, answer: Any) -> None:
        token_ids_T, step = named["input_ids"][0], named[STEP]
        if isinstance(step, PrunedContext):
            token_ids_T = token_ids_T[step.rows_R]
        answer.logits[0, token_ids_T[named["logits_to_keep"]] == POISON] = torch.nan

    hook = model.register_forward_hook(spoil, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def failing(seed: int, error: Callable[[], Exception], *places: str) -> Any:
    """A disturbance that lets a launch or a read fail in one of ten steps."""
    chance = random.Random(seed)

    def disturb(core: EngineCore) -> None:
        device = device_of(core)
        device.fails_to_launch = device.fails_to_read = None  # one that has not come about
        if chance.random() < 0.1:
            setattr(device, chance.choice(places), error())

    return disturb


def short_of_memory() -> Exception:
    """An error after which a step is planned anew."""
    return torch.OutOfMemoryError("no room")


def broken() -> Exception:
    """An error that ends the requests of a step."""
    return RuntimeError("a device is broken")


@pytest.mark.parametrize(
    ("first_seed", "fault"), [(0, None), (8, "nan"), (0, "memory"), (8, "device")]
)
def test_no_mixed_load_changes_an_answer(
    llama_checkpoint: Checkpoint, first_seed: int, fault: str | None
) -> None:
    """Random requests arrive, start in chunks, share pages, grow, are preempted, fail, and end."""
    seen, num_followed, num_ahead = Seen(), 0, 0
    for seed in range(first_seed, first_seed + 8):
        work = workload(llama_checkpoint, seed, NUM_SHARED)
        disturb = {
            "memory": failing(seed, short_of_memory, "fails_to_launch"),
            "device": failing(seed, broken, "fails_to_launch", "fails_to_read"),
        }.get(fault or "", lambda _: None)
        with poisoned(llama_checkpoint.model if fault == "nan" else nn.Identity()):
            expected, _ = serve(llama_checkpoint, work, is_ahead=False, **LIMITS)
            answers, core = serve(
                llama_checkpoint, work, is_ahead=True, observer=seen, disturb=disturb, **LIMITS
            )
        num_followed += device_of(core).num_prompts_followed
        num_ahead += device_of(core).num_prompts_ahead
        ends = {FinishReason.ABORT, *((FinishReason.ERROR,) if fault == "device" else ())}
        check(answers, expected, ends)
    assert num_followed > 15, "a step with prompts was hardly ever followed"
    assert num_ahead > 5, "a step with prompts was hardly ever ahead"
    assert seen.num_preempted + seen.num_rescaled + seen.num_shared > 5
    assert bool(seen.num_nan) == (fault == "nan")


def asked(checkpoint: Checkpoint, number: int, num_prompt: int, **sampling: Any) -> Request:
    """A request that ends by max_tokens."""
    prompt = [(number + 7 * place) % 29 for place in range(num_prompt)]
    sampling = {"ignore_eos": True, "temperature": 0.7, "seed": number, **sampling}
    made = request(deployment_of(checkpoint), prompt, **{"max_tokens": 6, **sampling})
    return replace(made, request_id=f"r{number}")


def serving(
    checkpoint: Checkpoint, *requests: Request, **limits: Any
) -> tuple[EngineCore, Answers]:
    """A core that is ahead, and requests that wait. Four may run."""
    core = core_of(checkpoint, is_ahead=True, **{"max_num_batched_tokens": 24, **limits})
    answers = Answers(core, checkpoint)
    answers.add(*requests)
    return core, answers


def test_a_first_token_is_delivered_before_the_next_step_runs(llama_checkpoint: Checkpoint) -> None:
    """The step after the prompt is launched by then, and its input is not known on the host."""
    core, answers = serving(llama_checkpoint, asked(llama_checkpoint, 1, 20))
    core.step()
    assert len(answers.outputs["r1"]) == 1
    assert len(device_of(core).queue) == 1, "the next step has run"
    answers.finish()


def test_a_long_prompt_leaves_the_next_step_to_requests_that_arrive(
    llama_checkpoint: Checkpoint,
) -> None:
    """Its next chunk is launched ahead only when no other request can start."""
    core, answers = serving(llama_checkpoint, asked(llama_checkpoint, 0, 90))
    for _ in range(2):
        core.step()
        assert core._in_flight is None
    answers.add(*(asked(llama_checkpoint, number, 40) for number in (1, 2, 3)))
    core.step()
    assert len(core.scheduler.running) == 4
    assert core._in_flight is not None
    assert core._in_flight.plan.num_prefill_tokens == 24
    answers.finish()


@pytest.mark.parametrize(
    ("sampling", "num_prompts_followed"),
    [
        ({}, 7),
        ({"prompt_logprobs": 1}, 0),  # every chunk has logprobs
        # The last of seven chunks is needed on the host, so the sixth is not followed either.
        ({"logprobs": 1}, 5),
        ({"repetition_penalty": 1.5}, 5),
        ({"max_tokens": 0}, 5),
    ],
    ids=str,
)
def test_what_the_host_needs_is_not_launched_ahead(
    llama_checkpoint: Checkpoint, sampling: dict[str, Any], num_prompts_followed: int
) -> None:
    """One request may run, so the chunks of its prompt are launched ahead if the host can wait."""
    one = asked(llama_checkpoint, 1, 24 * 6 + 5, **sampling)
    expected, _ = serve(llama_checkpoint, Workload({0: [one]}), is_ahead=False)
    core, answers = serving(llama_checkpoint, one, max_num_seqs=1)
    answers.finish()
    assert answers.results() == expected.results()
    assert device_of(core).num_prompts_followed == num_prompts_followed


def test_no_prompt_is_launched_where_a_forward_may_wait_for_the_device(
    llama_checkpoint: Checkpoint,
) -> None:
    """Its first token would be delivered only after the step behind it."""
    core, answers = serving(llama_checkpoint, asked(llama_checkpoint, 1, 40), max_num_seqs=1)
    device = device_of(core)
    device.is_captured = False
    core.step()
    assert core._in_flight is None
    answers.finish()
    assert device.num_prompts_followed == 0
    assert device.num_followed == 4, "decodes are launched ahead"


def test_the_duration_of_a_step_is_its_own(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is launched meanwhile, and its time counts for itself.

    On a clock of its own, a launch takes a second, and a step 10 seconds and one for each token.
    """
    requests = [asked(llama_checkpoint, number, 20 + 15 * number) for number in range(4)]
    core, answers = serving(llama_checkpoint, *requests)
    device = device_of(core)
    now = is_free_at = 0.0
    ends: dict[Deferred, float] = {}
    taken, noted = list[float](), list[float]()
    launch, read = device.launch, Deferred.read

    def launch_timed(spans: Sequence[Span], rows: Any, before: Any) -> Deferred:
        nonlocal now, is_free_at
        step = launch(spans, rows, before)
        now += 1.0
        taken.append(10.0 + sum(len(span.token_ids) for span in spans))
        is_free_at = ends[step] = max(now, is_free_at) + taken[-1]
        return step

    def read_timed(step: Deferred) -> Any:
        nonlocal now
        now = max(now, ends[step])
        return read(step)

    def note(num_tokens: int, seconds: float, num_decodes: int) -> None:
        noted.append(seconds)

    monkeypatch.setattr(step_timer, "perf_counter", lambda: now)
    monkeypatch.setattr(device, "launch", launch_timed)
    monkeypatch.setattr(Deferred, "read", read_timed)
    monkeypatch.setattr(core._prefill_budget, "note", note)
    answers.finish()
    assert len(noted) == len(taken) > 10
    assert device.num_prompts_ahead > 5
    assert max(abs(one - other) for one, other in zip(noted, taken, strict=True)) <= 1.0
