"""The growing policies: the computations that they equal, and those that they differ from.

`grow` reads all keys under the new table after a crossing. Keys of the first layer are those of a
computation from the start; above it they came from hidden states that attended under the old table,
so a deeper model's logits differ. `grow-exact` computes them again. `by_position` is `grow` whose
prompts cross tiers, too, so a position's states do not depend on the prompt's length.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner.penalties import SeenTokens
from ropewalk.model_runtime.runner.sampler import SamplingRow, sample
from ropewalk.rope import Policy, Yarn
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Result,
    answer,
    deployment_of,
    request,
    tiny_checkpoint,
)
from tests.doubles.runner_spy import RunnerSpy

L = 64
YARN = {"rope_type": "yarn", "factor": 4.0}
PROMPT = [(7 * at * at + at) % VOCAB_SIZE for at in range(50)]
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
NUM_NEW = 150  # from 50 tokens to 200: crosses 64 and 128


def grown(
    engines: EngineFactory, checkpoint: Checkpoint, policy: Policy, **sampling: Any
) -> Result:
    """The answer to the prompt under a policy, alone."""
    deployment = deployment_of(checkpoint, rope_scaling=YARN, rope_policy=policy)
    options = {"max_tokens": NUM_NEW, "logprobs": 3, "ignore_eos": True, **sampling}
    return answer(engines.over(checkpoint), request(deployment, PROMPT, **options))[0]


def under_table(model: PreTrainedModel, factor: float, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of a full forward of transformers under one static table."""
    config = type(model.config).from_dict(model.config.to_dict())
    if factor > 1:
        config.rope_parameters = {
            "rope_theta": 1e4,
            "original_max_position_embeddings": L,
            **YARN,
            "factor": factor,
        }
    config.max_position_embeddings = 4 * L
    fresh = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    fresh.load_state_dict(model.state_dict())
    with torch.inference_mode():
        logits: torch.Tensor = fresh.eval()(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def tier_of(num_tokens: int) -> float:
    """The factor in force if a sequence has so many tokens."""
    return next(factor for factor in (1.0, 2.0, 4.0) if num_tokens <= factor * L)


def test_grow_on_one_layer_equals_a_full_forward_under_the_current_table(
    engines: EngineFactory,
) -> None:
    """The reference is transformers' forward; logprobs agree within 1e-4 across two crossings."""
    result = grown(engines, tiny_checkpoint("llama", num_hidden_layers=1), "grow")
    assert result.num_rescales == 2
    tokens = [*PROMPT, *result.token_ids]
    untouched = tiny_model("llama", num_hidden_layers=1)
    tables = {factor: under_table(untouched, factor, tokens) for factor in (1.0, 2.0, 4.0)}
    for index, entry in enumerate(result.logprobs):
        so_far = len(PROMPT) + index
        expected = tables[tier_of(so_far)][so_far - 1]
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
        for token_id, logprob in entry.top:
            assert logprob == pytest.approx(float(expected[token_id]), abs=1e-4)


def test_grow_exact_equals_a_fixed_request_after_each_crossing(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The fixed request's prompt is the prompt and all tokens so far; the bits are equal."""
    result = grown(engines, llama_checkpoint, "grow-exact", temperature=0.8, seed=5)
    assert result.num_rescales == 2
    tokens = [*PROMPT, *result.token_ids]
    deployment = deployment_of(llama_checkpoint, rope_scaling=YARN)
    # The first token that is chosen from a tier, and the last.
    for first, last, factor in ((50, 64, 1.0), (65, 128, 2.0), (129, 199, 4.0)):
        prompt = tokens[:first]
        follow_up = request(
            deployment,
            prompt,
            RopeRequest(factor=factor, policy="fixed"),
            max_tokens=last - first + 1,
            logprobs=3,
            temperature=0.0,
        )
        expected = answer(engines.over(llama_checkpoint), follow_up)[0]
        got = result.logprobs[first - 50 : last - 50 + 1]
        # A sampled answer goes on from where it is, so compare the distributions step by step.
        assert got[0].top == expected.logprobs[0].top
    greedy = grown(engines, llama_checkpoint, "grow-exact")
    tokens = [*PROMPT, *greedy.token_ids]
    for first, last, factor in ((50, 64, 1.0), (65, 128, 2.0), (129, 199, 4.0)):
        follow_up = request(
            deployment,
            tokens[:first],
            RopeRequest(factor=factor, policy="fixed"),
            max_tokens=last - first + 1,
            logprobs=3,
        )
        expected = answer(engines.over(llama_checkpoint), follow_up)[0]
        assert greedy.token_ids[first - 50 : last - 50 + 1] == expected.token_ids
        assert greedy.logprobs[first - 50 : last - 50 + 1] == expected.logprobs


def test_the_seed_and_penalties_go_on_after_a_crossing(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Each token equals a draw from the logits of a fixed request over the tokens so far."""
    params = SamplingParams(
        temperature=0.9,
        seed=11,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.1,
    )
    options = {name: getattr(params, name) for name in ("temperature", "seed")}
    options |= {name: getattr(params, name) for name in PENALTIES}
    whole = grown(engines, llama_checkpoint, "grow-exact", **options)
    assert whole.num_rescales == 2
    tokens = [*PROMPT, *whole.token_ids]
    deployment = deployment_of(llama_checkpoint, rope_scaling=YARN)
    engine = engines.over(llama_checkpoint)
    last_rows: list[torch.Tensor] = []
    RunnerSpy(engine, lambda _, logits_RV: last_rows.extend(logits_RV[-1:].clone()))
    for at in (50, 63, 64, 65, 66, 90, 128, 129, 130, 199):
        rope = RopeRequest(factor=tier_of(at), policy="fixed")
        answer(engine, request(deployment, tokens[:at], rope, max_tokens=1))
        generated = tokens[len(PROMPT) : at]
        row = SamplingRow(params, len(generated), frozenset(), SeenTokens(PROMPT, generated))
        assert sample(last_rows[-1][None], [row]) == [tokens[at]], at


def test_min_tokens_counts_across_a_crossing(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The end token has a large bias, and is still not sampled before the 41st token."""
    bias = {"logit_bias": ((17, 100.0),), "stop_token_ids": (17,)}
    result = grown(engines, llama_checkpoint, "grow-exact", min_tokens=40, **bias)
    assert 17 not in result.token_ids[:40]
    assert result.token_ids[40:] == (17,)
    assert result.num_rescales == 1


def test_grow_and_grow_exact_differ_on_a_deeper_model(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Logprobs are equal before the first crossing and differ by more than 1e-3 after it."""
    forced = {"logit_bias": tuple((token, 100.0) for token in (17,))}  # the same tokens in both
    grow = grown(engines, llama_checkpoint, "grow", **forced)
    exact = grown(engines, llama_checkpoint, "grow-exact", **forced)
    assert grow.token_ids == exact.token_ids
    assert grow.logprobs[:15] == exact.logprobs[:15]
    differences = [
        abs(one.logprob - other.logprob)
        for one, other in zip(grow.logprobs[15:], exact.logprobs[15:], strict=True)
    ]
    assert max(differences) > 1e-3


def test_a_prompt_by_position_on_one_layer_equals_forwards_under_the_table_of_each_position(
    engines: EngineFactory,
) -> None:
    """The reference is transformers' forward; chunks end where tiers do."""
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=1)
    prompt = (PROMPT * 4)[:199]
    deployment = deployment_of(checkpoint, rope_scaling=YARN, rope_policy="by_position")
    engine = engines.over(checkpoint, max_num_batched_tokens=100)
    (result,) = answer(engine, request(deployment, prompt, max_tokens=1, prompt_logprobs=0))
    assert result.num_rescales == 0
    untouched = tiny_model("llama", num_hidden_layers=1)
    tables = {factor: under_table(untouched, factor, prompt) for factor in (1.0, 2.0, 4.0)}
    values = result.prompt_logprob_values()
    for at, value in enumerate(values, start=len(prompt) - len(values)):
        expected = tables[tier_of(at)][at - 1, prompt[at]]
        assert value == pytest.approx(float(expected), abs=1e-4)


def test_a_prompt_by_position_has_the_bits_of_tokens_that_grow_decoded(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The next turn of a conversation goes on from the states of this one, whatever its length."""
    grow = grown(engines, llama_checkpoint, "grow", temperature=0.0)
    assert grow.num_rescales == 2
    assert grown(engines, llama_checkpoint, "by_position", temperature=0.0) == grow
    deployment = deployment_of(llama_checkpoint, rope_scaling=YARN, rope_policy="by_position")
    for num_prompt in (63, 64, 65, 100, 128, 129, 180):
        num_known = num_prompt - len(PROMPT)
        prompt = [*PROMPT, *grow.token_ids[:num_known]]
        asked = request(
            deployment, prompt, max_tokens=200 - num_prompt, logprobs=3, ignore_eos=True
        )
        engine = engines.over(llama_checkpoint, max_num_batched_tokens=48)
        assert answer(engine, asked)[0].logprobs == grow.logprobs[num_known:]


def test_pages_by_position_serve_prompts_of_every_tier(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Under `grow`, a prompt of another tier is computed whole."""
    text = (PROMPT * 5)[:240]
    found = []
    for policy in ("by_position", "grow"):
        deployment = deployment_of(llama_checkpoint, rope_scaling=YARN, rope_policy=policy)
        engine = engines.over(llama_checkpoint, page_size=16)
        for length in (60, 120, 230, 100):
            asked = request(deployment, text[:length], max_tokens=4, logprobs=2)
            (outputs,) = engine.generate([asked])
            found.append(outputs[-1].num_cached_tokens)
            alone = answer(engines.over(llama_checkpoint, page_size=16), asked)
            assert [Result.of(outputs)] == alone
    assert found == [0, 48, 112, 96, 0, 0, 0, 96]


def test_a_prompt_is_computed_under_the_tier_that_covers_it(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """No chunk uses the tier of its own length, so grow equals one table up to a crossing."""
    prompt = (PROMPT * 3)[:100]
    results = []
    for policy in ("grow", "grow-exact", "fixed"):
        scaling = YARN if policy != "fixed" else {**YARN, "factor": 2.0}
        deployment = deployment_of(llama_checkpoint, rope_scaling=scaling, rope_policy=policy)
        engine = engines.over(llama_checkpoint, max_num_batched_tokens=32)
        results.append(answer(engine, request(deployment, prompt, max_tokens=20, logprobs=2))[0])
    assert results[0] == results[1] == results[2]


def test_the_profile_is_that_of_the_current_tier() -> None:
    """The request starts on factor 1, and the tier that covers its last position is factor 4."""
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=1)
    deployment = deployment_of(checkpoint, rope_scaling=YARN, rope_policy="grow")
    placed = deployment.choose(RopeRequest(), 50, 150)
    assert placed.tier.factor == 1.0
    top = placed.tier_covering(199)
    assert top.profile.scaling == Yarn(factor=4.0, original_max_position_embeddings=L)
