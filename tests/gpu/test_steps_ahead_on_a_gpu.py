"""Steps that are launched before the tokens of the step before them are read, on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.launched_step import LaunchedStep
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.token_mask import token_mask
from tests.doubles.deferred_runner import Answers
from tests.doubles.engines import EngineFactory, answer, deployment_of, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_launched_ahead_give_the_same_tokens(
    engines: EngineFactory,
    on_gpu: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    *,
    enforce_eager: bool,
) -> None:
    """One request has the same batch in every step, so its bits are the same."""
    deployment, launch = deployment_of(on_gpu), ModelRunner.launch
    followed: list[bool] = []

    def noted(runner: ModelRunner, spans: Any, rows: Any, before: Any) -> LaunchedStep:
        followed.append(before is not None)
        return launch(runner, spans, rows, before)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    engine = engines.over(on_gpu, enforce_eager=enforce_eager)
    answers = []
    for is_asynchronous in (True, False):
        monkeypatch.setattr(ModelRunner, "is_asynchronous", is_asynchronous)
        for sampling in (
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 0.8, "top_p": 0.9, "allowed": token_mask(range(300, 340))},
        ):
            asked = request(
                deployment, [5, 6, 7], max_tokens=40, seed=5, ignore_eos=True, **sampling
            )
            answers.append(answer(engine, asked)[0].token_ids)
    assert answers[:4] == answers[4:]
    assert set(answers[3]) <= set(range(300, 340))
    assert followed.count(True) == 4 * 38, "the first token is the prompt's"


@pytest.mark.parametrize("num_batched", [48, 600], ids=["captured", "queued"])
def test_mixed_steps_launched_ahead_give_the_same_tokens(
    on_gpu: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_batched: int
) -> None:
    """Requests that arrive together have the same batches in every step, so their bits are same."""
    deployment, launch, read = deployment_of(on_gpu), ModelRunner.launch, LaunchedStep.read
    config = EngineConfig(
        kv_cache_tokens=16384,
        max_model_len=2048,
        max_num_seqs=3,
        max_num_batched_tokens=num_batched,
    )
    core = build_engine(
        on_gpu, config, profiles=[each.profile for each in deployment.own_tiers]
    )._core
    lens = 5, min(2 * num_batched, 900), min(2 * num_batched + 9, 950)
    num_unread = num_ahead = 0

    def noted_launch(runner: ModelRunner, spans: Any, rows: Any, before: Any) -> LaunchedStep:
        nonlocal num_unread, num_ahead
        num_ahead += bool(num_unread) and any(len(span.token_ids) > 1 for span in spans)
        num_unread += 1
        return launch(runner, spans, rows, before)

    def noted_read(step: LaunchedStep) -> Any:
        nonlocal num_unread
        num_unread -= 1
        return read(step)

    monkeypatch.setattr(ModelRunner, "launch", noted_launch)
    monkeypatch.setattr(LaunchedStep, "read", noted_read)
    found = []
    for is_asynchronous in (True, False):
        monkeypatch.setattr(ModelRunner, "is_asynchronous", is_asynchronous)
        answers = Answers(core, on_gpu)
        for number, num_prompt in enumerate(lens):
            prompt_ids = [(number + 3 * place) % 300 + 3 for place in range(num_prompt)]
            sampling = {"temperature": 0.4 * number, "seed": number, "ignore_eos": True}
            asked = request(
                deployment, prompt_ids, cache_salt=str(is_asynchronous), max_tokens=20, **sampling
            )
            answers.add(replace(asked, request_id=f"{number}"))
        answers.finish()
        found.append(answers.results())
    assert found[0] == found[1]
    assert num_ahead >= 3
    assert num_unread == 0
