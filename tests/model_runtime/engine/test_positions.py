"""Position methods served by the engine: their references' logits, and the promises to the bit."""

import math
import random
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Preemptions,
    Result,
    answer,
    deployment_of,
    request,
    tiny_checkpoint,
)
from tests.oracles import position_references as references

L, PAGE = 64, 16
METHODS: dict[str, tuple[dict[str, Any], references.Attention]] = {
    "rerope": ({"window": 24}, references.rerope(24, L)),
    "self_extend": ({"window": 24, "group": 8}, references.self_extend(24, 8)),
    "dual_chunk": ({"chunk_size": 48, "local_size": 16}, references.dual_chunk(48, 16)),
    "string": ({"shift": 21, "window": 6}, references.string(21, 6)),
    "sinks": ({"sinks": 4, "window": 40}, references.sinks(4, 40)),
}
# The reach of those that have one.
LENGTHS = {"string": L + 15, "self_extend": (L - 24) * 8 + 24}


def prompt(num_tokens: int, seed: int = 1) -> list[int]:
    """Random tokens."""
    numbers = random.Random(seed)
    return [numbers.randrange(2, VOCAB_SIZE) for _ in range(num_tokens)]


def placed(checkpoint: Checkpoint, name: str, when: str = "always", **options: Any) -> Deployment:
    """A deployment with a position method."""
    positions = {"method": name, "when": when, **METHODS[name][0]}
    block = {"rope_type": "default", "positions": positions}
    longest = LENGTHS.get(name, 16 * L)
    return deployment_of(
        checkpoint, rope_scaling=block, page_size=PAGE, max_model_len=longest, **options
    )


def scored(deployment: Deployment, ids: list[int], **sampling: Any) -> Request:
    """A request for the logprobs of a prompt, and of a few tokens after it."""
    return request(deployment, ids, **{"max_tokens": 6, "prompt_logprobs": 0, **sampling})


def numbers(result: Result) -> tuple[Any, ...]:
    """All numbers of an answer."""
    return result.token_ids, result.prompt_logprob_values(), result.logprobs


@pytest.mark.parametrize("name", METHODS)
def test_a_forward_of_4_l_equals_the_transcribed_reference(
    engines: EngineFactory, llama_checkpoint: Checkpoint, name: str
) -> None:
    """Within 1e-4 of every token's logprob, and far from a forward without the method."""
    untouched = tiny_model("llama", 0)
    num_tokens = min(4 * L, LENGTHS.get(name, 4 * L))
    ids = prompt(num_tokens)
    engine = engines.over(llama_checkpoint)
    deployment = placed(llama_checkpoint, name)
    got = answer(engine, scored(deployment, ids, max_tokens=0))[0].prompt_logprob_values()
    tokens_T1 = torch.tensor(ids[1:])[:, None]

    def expected(attention: references.Attention) -> torch.Tensor:
        logits_TV = references.llama_logits(untouched, ids, attention)
        return logits_TV.log_softmax(-1)[:-1].gather(1, tokens_T1)[:, 0]

    difference = (torch.tensor(got).double() - expected(METHODS[name][1])).abs()
    assert float(difference.max()) < 1e-4
    without = (torch.tensor(got).double() - expected(references.string(10**6, 0))).abs()
    assert float(without.max()) > 1e-3


def test_the_temperature_of_qwen_is_that_of_the_requests_ceiling(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """A ceiling of exactly the prompt's length is what vLLM's prefill has."""
    ids = prompt(4 * L)
    method = {"method": "dual_chunk", "chunk_size": 64, "local_size": 16, "temperature": "qwen"}
    block = {"rope_type": "default", "positions": method}
    options = {"rope_policy": "grow", "page_size": PAGE, "max_model_len": 4 * L}
    deployment = deployment_of(llama_checkpoint, rope_scaling=block, **options)
    result = answer(engines.over(llama_checkpoint), scored(deployment, ids, max_tokens=0))[0]
    scale = (0.1 * math.log(4) + 1) ** 2
    attention = references.dual_chunk(64, 16, scale)
    logits_TV = references.llama_logits(tiny_model("llama", 0), ids, attention)
    expected = logits_TV.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    got = torch.tensor(result.prompt_logprob_values()).double()
    assert float((got - expected).abs().max()) < 1e-4


def test_a_checkpoint_with_dual_chunk_attention_is_served_as_trained(
    engines: EngineFactory,
) -> None:
    """The shape of Qwen2.5-7B-Instruct-1M: C is L; its reference has the prompt as the ceiling."""
    block = {"chunk_size": L, "local_size": 16, "original_max_position_embeddings": L}
    config = {"max_position_embeddings": 4 * L, "dual_chunk_attention_config": block}
    checkpoint = tiny_checkpoint("llama", **config)
    assert checkpoint.native.native_len == L
    deployment = deployment_of(checkpoint, page_size=PAGE)
    assert [tier.ceiling for tier in deployment.own_tiers] == [L, 2 * L, 4 * L]
    engine = engines.over(checkpoint)
    for num_tokens, scale in ((L, 1.0), (4 * L, 0.1 * math.log(4) + 1)):
        ids = prompt(num_tokens)
        got = answer(engine, scored(deployment, ids, max_tokens=0))[0].prompt_logprob_values()
        attention = references.dual_chunk(L, 16, scale**2)
        logits_TV = references.llama_logits(tiny_model("llama", 0, **config), ids, attention)
        expected = logits_TV.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert float((torch.tensor(got).double() - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("name", METHODS)
def test_under_always_no_policy_and_no_length_changes_a_bit(
    engines: EngineFactory, llama_checkpoint: Checkpoint, name: str
) -> None:
    """A token's state does not depend on what follows, so all policies are one."""
    engine = engines.over(llama_checkpoint)
    ids = prompt(50)
    room = min(LENGTHS.get(name, 2 * L + PAGE), 2 * L + PAGE) - len(ids)  # in the third tier
    results = []
    for policy in ("grow", "grow-exact", "by_position", "fixed"):
        deployment = placed(llama_checkpoint, name, rope_policy=policy)
        for max_tokens in (6, room):
            results.append(
                answer(engine, scored(deployment, ids, max_tokens=max_tokens, logprobs=1))[0]
            )
            assert results[-1].num_rescales == 0
    short, long = results[::2], results[1::2]
    assert len({repr(numbers(each)) for each in short}) == 1
    assert len({repr(numbers(each)) for each in long}) == 1
    assert long[0].token_ids[:6] == short[0].token_ids
    assert long[0].logprobs[:6] == short[0].logprobs


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"string"}))
def test_grow_is_native_up_to_l_and_the_method_beyond(
    engines: EngineFactory, llama_checkpoint: Checkpoint, name: str
) -> None:
    """Both to the bit."""
    engine = engines.over(llama_checkpoint)
    native = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "default"})
    beyond = placed(llama_checkpoint, name, "pinned", rope_policy="grow")
    always = placed(llama_checkpoint, name, "always")
    short, long = prompt(L - 6), prompt(2 * L)
    ask = [scored(native, short), scored(beyond, short), scored(beyond, long), scored(always, long)]
    results = [numbers(answer(engine, each)[0]) for each in ask]
    assert results[0] == results[1]
    assert results[2] == results[3]


def test_neighbours_chunks_and_prefixes_change_no_bit(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Every method in one batch beside native requests, in chunks of any size."""
    deployments = [placed(llama_checkpoint, name) for name in METHODS]
    deployments.append(deployment_of(llama_checkpoint))
    lengths = (70, 75, 130, 33)
    asked = [
        scored(each, prompt(length, seed=at), max_tokens=4)
        for at, each in enumerate(deployments)
        for length in lengths[: 2 if each.max_len < 130 else 4]
    ]
    alone = engines.over(llama_checkpoint)
    expected = [numbers(answer(alone, each)[0]) for each in asked]
    # The same again reads prefixes from the cache, and scores no prompt.
    again = [
        request(deployments[at // 4], each.prompt_ids, max_tokens=4)
        for at, each in enumerate(asked[:12])
    ]
    hits = [answer(alone, each)[0] for each in again]
    assert [each.token_ids for each in hits] == [each[0] for each in expected[:12]]
    for tokens_a_step in (5, 16, 47, 512):
        crowd = engines.over(llama_checkpoint, max_num_batched_tokens=tokens_a_step)
        order = list(range(len(asked)))
        random.Random(tokens_a_step).shuffle(order)
        together = answer(crowd, *[asked[at] for at in order])
        assert [numbers(each) for each in together] == [expected[at] for at in order]


def test_a_preempted_sequence_continues_to_the_bit(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Its pages are taken, and computed again by the same ranges."""
    names = [name for name in METHODS if name != "string"]
    asked = [
        request(placed(llama_checkpoint, name), prompt(90, seed=at), max_tokens=60)
        for at, name in enumerate(names)
    ]
    alone = engines.over(llama_checkpoint)
    expected = [answer(alone, each)[0].token_ids for each in asked]
    watcher = Preemptions()
    crowd = engines.over(llama_checkpoint, observer=watcher, kv_cache_tokens=20 * PAGE)
    assert [each.token_ids for each in answer(crowd, *asked)] == expected
    assert watcher.num > 0


@pytest.mark.parametrize("name", ["rerope", "self_extend", "dual_chunk"])
def test_native_pages_are_read_by_a_request_with_a_method(
    engines: EngineFactory, llama_checkpoint: Checkpoint, name: str
) -> None:
    """The first M or w tokens have native bits, so their pages are shared; later ones are not."""
    native = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "yarn", "factor": 16.0})
    method = placed(llama_checkpoint, name)
    num_native = method.own_tiers[-1].profile.num_native
    ids = prompt(60)
    cold = answer(engines.over(llama_checkpoint), request(method, ids, max_tokens=5, logprobs=1))
    engine = engines.over(llama_checkpoint)
    answer(engine, request(native, ids, max_tokens=1))  # within L, so natively
    outputs = engine.generate([request(method, ids, max_tokens=5, logprobs=1)])[0]
    assert outputs[-1].num_cached_tokens == num_native // PAGE * PAGE > 0
    assert Result.of(outputs) == cold[0]


def test_decoding_equals_a_prefill_of_the_same_tokens(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Every token's logprob when it was drawn, and when it is scored, to the bit."""
    engine = engines.over(llama_checkpoint)
    for name in METHODS:
        deployment = placed(llama_checkpoint, name)
        ids = prompt(30)
        drawn = answer(engine, request(deployment, ids, max_tokens=45, logprobs=0))[0]
        whole = [*ids, *drawn.token_ids]
        again = answer(engine, scored(deployment, whole, max_tokens=0))[0]
        assert again.prompt_logprob_values()[-45:] == [each.logprob for each in drawn.logprobs]


def test_a_request_chooses_among_the_allowed_methods(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """By its name, and with the parameters that answers report."""
    deployment = deployment_of(
        llama_checkpoint, allowed_positions=["rerope", "dual_chunk"], page_size=PAGE
    )
    block = {"rope_type": "default", "positions": {"method": "rerope"}}
    own = deployment_of(llama_checkpoint, rope_scaling=block, page_size=PAGE)
    engine = engines.over(llama_checkpoint)
    ids = prompt(2 * L)
    asked = RopeRequest(positions={"method": "rerope", "window": 32})
    results = [
        answer(engine, request(each, ids, rope, max_tokens=3, logprobs=0))[0]
        for each, rope in ((deployment, asked), (own, None), (deployment, None))
    ]
    assert results[0] == results[1] != results[2]


def test_sinks_serve_a_context_far_longer_than_the_cache(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The pages between are released, and the answer has the same bits."""
    deployment = placed(llama_checkpoint, "sinks")
    asked = [
        scored(deployment, prompt(num_tokens, seed=num_tokens), logprobs=1, max_tokens=20)
        for num_tokens in (350, 450)
    ]
    wide = engines.over(llama_checkpoint)
    expected = [numbers(answer(wide, each)[0]) for each in asked]
    narrow = engines.over(llama_checkpoint, kv_cache_tokens=14 * PAGE, max_num_batched_tokens=32)
    assert [numbers(each) for each in answer(narrow, *asked)] == expected
    again = answer(narrow, request(deployment, asked[0].prompt_ids, max_tokens=20, logprobs=1))[0]
    assert again.token_ids == expected[0][0]
    assert again.logprobs == expected[0][2]


def test_sinks_do_not_find_a_token_that_was_dropped(engines: EngineFactory) -> None:
    """A change in the middle changes no bit of the last tokens' own attention, with one layer."""
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=1)
    deployment = placed(checkpoint, "sinks")
    engine = engines.over(checkpoint)
    ids, other = prompt(300), prompt(300)
    other[100:200] = prompt(100, seed=5)
    results = [
        answer(engine, request(deployment, each, max_tokens=5, logprobs=2))[0]
        for each in (ids, other)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("architecture", ["gemma3_text", "cohere2"])
def test_sinks_are_refused_beside_layers_that_read_every_key(architecture: str) -> None:
    """Their keys may have been released."""
    checkpoint = tiny_checkpoint(architecture)
    block = {"rope_type": "default", "positions": {"method": "sinks"}}
    deployment = deployment_of(checkpoint, rope_scaling=block)
    profiles = [tier.profile for tier in deployment.own_tiers]
    with pytest.raises(ModelError, match="positions: sinks is not served for a model with layers"):
        build_runner(checkpoint, EngineConfig(kv_cache_tokens=640, max_model_len=640), profiles)


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "sinks"])
def test_grow_exact_continues_under_the_method_to_the_bit(
    engines: EngineFactory, llama_checkpoint: Checkpoint, name: str
) -> None:
    """Beyond L, every logprob is that of the method from the first token on."""
    engine = engines.over(llama_checkpoint)
    growing = placed(llama_checkpoint, name, "pinned", rope_policy="grow-exact")
    ids = prompt(L - 10)
    grown = answer(engine, request(growing, ids, max_tokens=50, logprobs=0))[0]
    assert grown.num_rescales == 1
    whole = [*ids, *grown.token_ids]
    again = answer(engine, scored(placed(llama_checkpoint, name), whole, max_tokens=0))[0]
    beyond = L + 2 - len(ids)  # the first tokens are native, and so is the one at the crossing
    expected = again.prompt_logprob_values()[-len(grown.token_ids) :]
    assert [each.logprob for each in grown.logprobs][beyond:] == expected[beyond:]
