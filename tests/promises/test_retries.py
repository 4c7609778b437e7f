"""A step that finds no memory in its table or its draw is retried, and no answer differs."""

from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention.rope_tables import LayerTables
from ropewalk.model_runtime.engine import choose_tokens
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.doubles.deferred_runner import Answers, core_of
from tests.doubles.engines import EngineFactory, answer, deployment_of, request, tiny_checkpoint


def test_a_rotation_table_without_memory_is_built_at_the_retry(
    engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry has the numbers of its own table, so its answer is that of another engine."""
    checkpoint = tiny_checkpoint("llama")
    linear = {"rope_type": "linear", "factor": 4.0}
    scaled = deployment_of(checkpoint, rope_scaling=linear, rope_policy="fixed")
    requests = [
        request(each, [7] * 20, max_tokens=8, ignore_eos=True)
        for each in (deployment_of(checkpoint), scaled)
    ]
    expected = answer(engines.over(checkpoint), *requests)
    fill, num_calls = LayerTables.fill, 0

    def fails_once(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:  # of the second profile
            raise torch.OutOfMemoryError("CUDA out of memory")
        fill(*arguments)

    monkeypatch.setattr(LayerTables, "fill", fails_once)
    assert answer(engines.over(checkpoint), *requests) == expected
    assert num_calls > 4


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 1}], ids=["decodes", "others"])
def test_a_draw_without_memory_is_tried_again_with_one_fewer(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
) -> None:
    """Nothing of the step is recorded before its tokens are known, so no token differs."""
    deployment = deployment_of(llama_checkpoint)
    requests = [
        request(deployment, [number] * 4, temperature=1.0, seed=number, max_tokens=9, **sampling)
        for number in range(3)
    ]
    expected = answer(engines.over(llama_checkpoint), *requests)
    draw, num_draws = choose_tokens.sample_rows, 0

    def fails_twice(*arguments: Any) -> Any:
        nonlocal num_draws
        num_draws += 1
        if num_draws in {1, 6}:  # of the prompts, and of decodes
            raise torch.OutOfMemoryError("CUDA out of memory")
        return draw(*arguments)

    monkeypatch.setattr(choose_tokens, "sample_rows", fails_twice)
    assert answer(engines.over(llama_checkpoint), *requests) == expected
    assert num_draws > 6


def test_a_request_waits_for_no_retry_that_has_left(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was to be retried is aborted, and the one that made room for it goes on."""
    deployment = deployment_of(llama_checkpoint)
    asked = [request(deployment, [number] * 4, max_tokens=5) for number in (1, 2)]
    core = core_of(llama_checkpoint, is_ahead=False)
    answers = Answers(core, llama_checkpoint)
    answers.add(*asked)
    draw = choose_tokens.sample_rows

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(choose_tokens, "sample_rows", fails)
    core.step()
    monkeypatch.setattr(choose_tokens, "sample_rows", draw)
    assert len(core.scheduler.waiting) == 1
    core.abort(core.scheduler.running[0].request.request_id)
    answers.finish()
    assert sorted(map(len, (each.token_ids for each in answers.results().values()))) == [0, 5]
