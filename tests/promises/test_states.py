"""Models whose layers keep states keep promise 2: the bits of an answer in any company.

The references are each request alone, in a fresh engine, and transformers in float64.
"""

import random
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.request import Output
from ropewalk.model_runtime.scheduling.sequence_states import SequenceStates
from tests.checkpoints.adversarial_weights import Change, norms_with_zeros, outlier_rows
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_config, tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Result,
    answer,
    checkpoint_of,
    deployment_of,
    random_tokens,
    request,
)
from tests.doubles.tokens import byte_tokenizer_fast
from tests.model_runtime.loading.test_adversarial_weights import check_served
from tests.promises.test_batch_invariance import SharedForwards, mixed_requests

ARCHITECTURES = ("qwen3_5_text", "lfm2")
PAGE = 16


@pytest.fixture(scope="module", params=ARCHITECTURES)
def hybrid(request: pytest.FixtureRequest) -> Checkpoint:
    """A tiny model of each kind of state: a delta rule with a convolution, and one alone."""
    return checkpoint_of(tiny_model(request.param))


def _states(engine: Any) -> SequenceStates:
    states: SequenceStates = engine._core.scheduler.pages.states
    return states


def test_a_mixed_batch_answers_like_each_request_alone(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """Nine methods, factors and lengths share forwards, in chunks of 20 and of 512 tokens."""
    requests = mixed_requests(hybrid, VOCAB_SIZE, 4)
    expected = engines.alone(hybrid, requests)
    for chunk in (20, 512):
        engine = engines.over(hybrid, max_num_batched_tokens=chunk, max_num_seqs=16)
        watched = SharedForwards(engine)
        assert answer(engine, *requests) == expected
        assert max(watched.num_sequences_per_call) >= 5


def test_a_next_turn_computes_its_new_tokens_and_less_than_two_pages(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """A conversation goes on from the snapshot in its last answer."""
    deployment = deployment_of(hybrid, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    rope = RopeRequest("yarn", 4.0, "fixed")  # one profile for all turns
    prompt = random_tokens(70)
    engine = engines.over(hybrid)
    for turn in range(3):
        asked = request(deployment, prompt, rope, max_tokens=40)
        (outputs,) = engine.generate([asked])
        assert Result.of(outputs) == engines.alone(hybrid, [asked])[0]
        if turn:
            assert len(prompt) - outputs[-1].num_cached_tokens < 10 + 2 * PAGE
        prompt += [*Result.of(outputs).token_ids, *random_tokens(10, 100 + turn)]


def test_prompts_that_share_a_beginning_find_a_snapshot_where_they_part(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """The second request takes the snapshot, which the third one finds."""
    deployment = deployment_of(hybrid)
    shared = random_tokens(83)
    engine = engines.over(hybrid)
    found = []
    for seed in (1, 2, 3):
        asked = request(deployment, shared + random_tokens(30, seed), max_tokens=5, logprobs=2)
        (outputs,) = engine.generate([asked])
        assert Result.of(outputs) == engines.alone(hybrid, [asked])[0]
        found.append(outputs[-1].num_cached_tokens)
    assert found == [0, 0, 80]


def test_equal_prompts_at_once_are_computed_once(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """The choices of a request wait for the first one's snapshot, as they do for pages."""
    deployment = deployment_of(hybrid)
    requests = [
        request(deployment, random_tokens(100), max_tokens=6, temperature=1.0, seed=seed)
        for seed in range(4)
    ]
    expected = engines.alone(hybrid, requests)
    engine = engines.over(hybrid)
    outputs = engine.generate(requests)
    assert [Result.of(each) for each in outputs] == expected
    assert sorted(each[-1].num_cached_tokens for each in outputs) == [0, 96, 96, 96]


@pytest.mark.parametrize("chunk", [16, 64])
def test_prompts_at_once_compute_what_they_share_once(
    hybrid: Checkpoint, engines: EngineFactory, chunk: int
) -> None:
    """The first one takes a snapshot where the others leave it, and they wait for it.

    Two of the others go on together for three more pages, which they compute once, too.
    """
    deployment = deployment_of(hybrid, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    rope = RopeRequest("yarn", 4.0, "fixed")  # one profile for all lengths
    shared, longer = random_tokens(70), random_tokens(70) + random_tokens(50, 9)
    prompts = [
        shared + random_tokens(40, 1),
        longer + random_tokens(9, 2),
        longer + random_tokens(11, 3),
    ]
    prompts += [shared + random_tokens(25, seed) for seed in (4, 5)]
    requests = [request(deployment, each, rope, max_tokens=5, logprobs=2) for each in prompts]
    expected = engines.alone(hybrid, requests)
    engine = engines.over(hybrid, max_num_batched_tokens=chunk, max_num_seqs=16)
    outputs = engine.generate(requests)
    assert [Result.of(each) for each in outputs] == expected
    assert [each[-1].num_cached_tokens for each in outputs] == [0, 64, 112, 64, 64]


def test_a_prompt_waits_for_no_snapshot_that_never_comes(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """Three slots are too few for one, and the answers are the same."""
    deployment = deployment_of(hybrid)
    requests = [
        request(deployment, random_tokens(70) + random_tokens(30, seed), max_tokens=5)
        for seed in range(3)
    ]
    expected = engines.alone(hybrid, requests)
    for num_slots in (1, 2, 3):
        assert answer(engines.over(hybrid, num_state_slots=num_slots), *requests) == expected


def test_a_growing_answer_evicts_no_snapshot_of_another_prompt(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """An answer has one snapshot at a time. Four slots are those of two prompts and an answer."""
    deployment = deployment_of(hybrid)
    engine = engines.over(hybrid, num_state_slots=4)
    first = request(deployment, random_tokens(70), max_tokens=3)
    other = request(deployment, random_tokens(40, 1), max_tokens=70, ignore_eos=True)
    found = []
    for asked in (first, other, first):
        (outputs,) = engine.generate([asked])
        found.append(outputs[-1].num_cached_tokens)
    assert found == [0, 0, 64]


def test_few_slots_let_sequences_wait(hybrid: Checkpoint, engines: EngineFactory) -> None:
    """Two slots serve five requests, of which at most two run; no snapshot has a slot then."""
    deployment = deployment_of(hybrid)
    requests = [request(deployment, random_tokens(50, seed), max_tokens=12) for seed in range(5)]
    expected = engines.alone(hybrid, requests)
    engine = engines.over(hybrid, num_state_slots=2)
    watched = SharedForwards(engine)
    assert answer(engine, *requests) == expected
    assert max(watched.num_sequences_per_call) == 2


def test_profiles_and_salts_share_no_snapshot(hybrid: Checkpoint, engines: EngineFactory) -> None:
    """A state depends on the table under which the layers before it attended."""
    deployment = deployment_of(hybrid, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    engine = engines.over(hybrid)
    prompt = random_tokens(60)
    fixed = RopeRequest("yarn", 4.0, "fixed")
    for rope, salt in ((None, ""), (fixed, ""), (None, "other")):
        asked = request(deployment, prompt, rope, salt, max_tokens=3)
        (outputs,) = engine.generate([asked])
        assert outputs[-1].num_cached_tokens == 0
    (outputs,) = engine.generate([request(deployment, prompt, fixed, max_tokens=3)])
    assert outputs[-1].num_cached_tokens == 48
    assert _states(engine).pool.num_used == 0


def test_a_step_without_memory_advances_no_state_twice(
    hybrid: Checkpoint, engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head fails after all layers have advanced their states; the retry begins from a slot."""
    deployment = deployment_of(hybrid)
    requests = [
        request(deployment, random_tokens(30 + seed, seed), max_tokens=20, logprobs=2)
        for seed in range(3)
    ]
    expected = engines.alone(hybrid, requests)
    engine = engines.over(hybrid)
    prepare, num_calls = engine._core._runner.prepare, 0

    def fails_twice(spans: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        forward, number = prepare(spans), num_calls

        def run() -> Any:
            logits = forward()
            if number in {1, 12}:  # of prompts, and of decodes
                raise torch.OutOfMemoryError("out of memory")
            return logits

        return run

    monkeypatch.setattr(engine._core._runner, "prepare", fails_twice)
    assert answer(engine, *requests) == expected
    assert num_calls > 20


def test_memory_for_one_sequence_at_a_time_is_enough(
    hybrid: Checkpoint, engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts without a snapshot would begin again after each failure, for ever."""
    deployment = deployment_of(hybrid)
    requests = [
        request(deployment, random_tokens(50 + seed, seed), max_tokens=6) for seed in range(2)
    ]
    expected = engines.alone(hybrid, requests)
    engine = engines.over(hybrid, max_num_batched_tokens=16)
    prepare = engine._core._runner.prepare

    def prepare_one(spans: Any) -> Any:
        def run() -> Any:
            if len(spans) > 1:
                raise torch.OutOfMemoryError("out of memory")
            return forward()

        forward = prepare(spans)
        return run

    monkeypatch.setattr(engine._core._runner, "prepare", prepare_one)
    assert answer(engine, *requests) == expected


def test_an_aborted_request_gives_its_slots_back(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """Slots of prompts, of decodes and of snapshots in a step."""
    deployment = deployment_of(hybrid)
    asked = request(deployment, random_tokens(40), max_tokens=200)
    engine = engines.over(hybrid)

    def abort(output: Output) -> None:
        if output.token_ids and output.finish_reason is None:
            engine.abort(asked.request_id)

    ended = Event()
    engine.submit(asked, lambda output: (abort(output), output.finish_reason and ended.set()))
    assert ended.wait(30)
    answer(engine, request(deployment, random_tokens(20, 1), max_tokens=2))
    assert _states(engine).pool.num_used == 0


def _saturated(model: nn.Module, rng: random.Random) -> None:
    """Decays of 0 and of 1."""
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            for index in range(len(parameter)):
                parameter[index] = rng.choice((-40.0, -3.0, 4.0, 40.0))


def _closed_gates(model: nn.Module, rng: random.Random) -> None:
    """Gates and projections of zero, and zeros in norms."""
    for name, parameter in model.named_parameters():
        if name.endswith(("in_proj_z.weight", "in_proj_b.weight", "in_proj.weight")):
            parameter[:: rng.choice((2, 3))] = 0.0
        if name.endswith(("conv1d.weight", "conv.weight")):
            parameter[::3] = 0.0
    norms_with_zeros(model, rng)


@pytest.mark.parametrize("kind", [_saturated, _closed_gates, outlier_rows])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, id="float32"),
        pytest.param(2, id="bfloat16", marks=pytest.mark.long),  # compiles kernels of its own
    ],
)
def test_extreme_weights_answer_as_transformers_does(
    architecture: str, kind: Change, seed: int
) -> None:
    """Float64 and within rounding, and the same bits alone and beside others."""
    check_served(architecture, seed, (kind,))


def test_a_checkpoint_with_an_image_tower_is_served_for_text_past_its_length(
    engines: EngineFactory, tmp_path: Path
) -> None:
    """Weights under the names of the whole model, mRoPE in the nested block, three factors."""
    block = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    model = tiny_model("qwen3_5", text_config={"rope_parameters": block})
    weights = {
        name.replace("model.", "model.language_model.", 1): each.contiguous()
        for name, each in model.state_dict().items()
    }
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    tiny_config("qwen3_5", text_config={"rope_parameters": block}).save_pretrained(tmp_path)
    byte_tokenizer_fast().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.report.bitwise
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    requests = [
        request(deployment, random_tokens(count, count), max_tokens=9, logprobs=2)
        for count in (50, 100, 200, 400)
    ]
    assert [each.tier_choice.tier.factor for each in requests] == [1.0, 2.0, 4.0, 8.0]
    expected = engines.alone(checkpoint, requests)
    assert answer(engines.over(checkpoint), *requests) == expected
