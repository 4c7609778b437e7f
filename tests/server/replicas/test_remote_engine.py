"""Answers of real engines are the same to the byte however often a replica is lost."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.text.grammar_trial import ONE_SPACE
from tests.draft_adversary import Counted, tell, use_adversary
from tests.engines import EngineFactory, Result, deployment_of, request, tiny_checkpoint
from tests.scripted_model import Script
from tests.server.replicas.lossy import Client, EngineReplicas, run, until
from tests.tokens import byte_tokenizer

PROMPT = tuple(range(40, 90))
# Outputs after which the first, the second... run is lost.
LOSSES = [(0,), (1,), (7,), (23,), (9, 4), (4, 9), (0, 5, 5)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoints() -> list[Checkpoint]:
    """Equal models, one for each replica, with a row for each byte."""
    return [tiny_checkpoint("llama", vocab_size=256) for _ in range(4)]


@pytest.fixture
def replicas(engines: EngineFactory, checkpoints: Sequence[Checkpoint]) -> list[Engine]:
    """Four engines, which compute a prompt in chunks."""
    return [
        engines.over(each, kv_cache_tokens=1024, max_num_seqs=4, max_num_batched_tokens=32)
        for each in checkpoints
    ]


@pytest.fixture(scope="module")
def deployment(checkpoints: Sequence[Checkpoint]) -> Deployment:
    """A deployment of the model."""
    return deployment_of(checkpoints[0], rope_policy="fixed")


def continued(
    replicas: Sequence[Engine], losses: Sequence[int], *requests: Request
) -> tuple[list[Result], Client, EngineReplicas]:
    """The answers to requests that are served together, each with these losses."""
    lossy, clients = EngineReplicas(replicas, losses), list[Client]()

    async def test() -> None:
        client = Client(lossy, replicas[0].config)
        clients.append(client)
        client.submit(*requests)
        await client.all_ended()
        assert client.num_admitted == 0
        assert not lossy.open

    run(test)
    (client,) = clients
    return [Result.of(client.outputs[each.request_id]) for each in requests], client, lossy


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "cut tail": {"temperature": 0.9, "seed": 11, "top_p": 0.8, "top_k": 40},
    "penalties": {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.7},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"logprobs": 1, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_an_answer_is_the_undisturbed_one_after_any_loss(
    replicas: list[Engine], deployment: Deployment, sampling: dict[str, Any]
) -> None:
    """Tokens, text and numbers; nothing is lost, and nothing comes twice."""
    asked = request(deployment, PROMPT, max_tokens=NUM_TOKENS, **sampling)
    (undisturbed,) = (Result.of(each) for each in replicas[3].generate([asked]))
    assert len(undisturbed.token_ids) == NUM_TOKENS
    for losses in LOSSES:
        (answer,), client, lossy = continued(replicas, losses, asked)
        assert answer == undisturbed
        assert [name for name, _ in lossy.served] == [
            f"replica-{at}" for at in range(len(losses) + 1)
        ]
        assert client.counts.num_tokens == client.counts.num_generated == NUM_TOKENS
        assert client.counts.context_lens == list(
            range(len(PROMPT) + 2, len(PROMPT) + NUM_TOKENS + 1)
        )
        assert client.counts.num_started == 1
        assert client.counts.outcomes == {"ok": 1}
        assert client.counts.lost_by.total() == len(losses)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_drafts_change_no_continued_answer(
    engines: EngineFactory,
    checkpoints: Sequence[Checkpoint],
    deployment: Deployment,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run is lost within the tokens of a step, and another engine has other drafts."""
    asked = request(deployment, PROMPT, max_tokens=NUM_TOKENS, **sampling)
    (undisturbed,) = map(Result.of, engines.over(checkpoints[3]).generate([asked]))
    adversary = use_adversary(monkeypatch)
    tell(adversary, 1, 0.8, [(asked, undisturbed)])
    counted = Counted()
    drafting = [
        engines.over(each, observer=counted, kv_cache_tokens=1024, max_draft_tokens=most)
        for each, most in zip(checkpoints, (7, 0, 15), strict=False)
    ]
    for losses in LOSSES[:-1]:
        (answer,), client, _ = continued(drafting, losses, asked)
        assert answer == undisturbed
        assert client.counts.num_tokens == NUM_TOKENS
        assert client.counts.outcomes == {"ok": 1}
    for each in drafting:
        each.stop()  # a step is counted after its last output
    assert 20 < counted.num_accepted < counted.num_drafted


def test_stop_strings_end_a_continued_answer_at_the_same_place(
    replicas: list[Engine], deployment: Deployment
) -> None:
    """The text that may begin one is held back, and is not in the first run's outputs."""
    asked = request(deployment, PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
    (whole,) = (Result.of(each) for each in replicas[3].generate([asked]))
    stop = whole.text[8:12]
    asked = request(
        deployment, PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=3, stop=(stop,), logprobs=1
    )
    (undisturbed,) = (Result.of(each) for each in replicas[3].generate([asked]))
    assert undisturbed.finish_reason is FinishReason.STOP
    for lost_after in range(len(undisturbed.token_ids)):
        (answer,), _, _ = continued(replicas, (lost_after,), asked)
        assert answer == undisturbed


def test_a_grammar_holds_in_a_continued_answer(
    replicas: list[Engine], deployment: Deployment
) -> None:
    """The second run begins it anew; the answer may end with an output without a token."""
    schema = '{"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 3}'
    grammar = GrammarCompiler(byte_tokenizer()).compile_again((schema, ONE_SPACE))
    plain = request(deployment, PROMPT, max_tokens=40, temperature=1.0, seed=1)
    asked = Request(
        plain.request_id, plain.prompt_ids, plain.sampling, plain.placement, grammar=grammar
    )
    outputs = replicas[3].generate([asked])[0]
    undisturbed = Result.of(outputs)
    assert undisturbed.finish_reason is FinishReason.STOP
    assert undisturbed.text.startswith("[")
    for lost_after in range(len(outputs)):
        (answer,), _, _ = continued(replicas, (lost_after,), asked)
        assert answer == undisturbed


def test_a_scored_prompt_without_an_answer_is_served_and_counted(
    replicas: list[Engine], deployment: Deployment
) -> None:
    """No token comes, and yet the request was started."""
    asked = request(deployment, PROMPT, max_tokens=0, prompt_logprobs=1)
    (undisturbed,) = (Result.of(each) for each in replicas[3].generate([asked]))
    (answer,), client, _ = continued(replicas, (0,), asked)
    assert answer == undisturbed
    assert len(answer.prompt_logprobs) == len(PROMPT)
    assert client.counts.num_started == 1
    assert client.counts.num_tokens == 0


def test_progress_goes_on_after_a_loss_during_prefill(
    replicas: list[Engine], deployment: Deployment
) -> None:
    """It comes once for each part of the prompt."""
    plain = request(deployment, PROMPT, max_tokens=4)
    asked = Request(
        plain.request_id, plain.prompt_ids, plain.sampling, plain.placement, wants_progress=True
    )
    answers, client, _ = continued(replicas, (1, 2, 4), asked)
    computed = [
        each.progress.num_computed_tokens
        for each in client.outputs[asked.request_id]
        if each.progress is not None
    ]
    assert computed == [32, 50]
    assert len(answers[0].token_ids) == 4


def test_another_model_in_a_replica_ends_the_answer_with_an_error(
    engines: EngineFactory, deployment: Deployment, replicas: list[Engine]
) -> None:
    """Tokens of two models are never mixed."""
    other = engines.over(tiny_checkpoint("llama", seed=1, vocab_size=256))
    asked = request(deployment, PROMPT, max_tokens=NUM_TOKENS)
    (undisturbed,) = (Result.of(each) for each in replicas[0].generate([asked]))
    (answer,), client, _ = continued([replicas[0], other], (6,), asked)
    assert answer.finish_reason is FinishReason.ERROR
    assert answer.token_ids == undisturbed.token_ids[:6]
    assert client.counts.outcomes == {"diverged": 1}
    assert client.counts.finished_by == {FinishReason.ERROR: 1}


@pytest.fixture
def slow(engines: EngineFactory, checkpoints: Sequence[Checkpoint]) -> Engine:
    """An engine with a step of 20 ms, for one request at a time."""
    script = Script(checkpoints[0], "abcdefgh")
    script.delay_s = 0.02
    return engines.over(checkpoints[0], runner=script, max_num_seqs=1)


def test_an_abort_ends_a_request_before_it_starts_while_it_waits_and_while_it_runs(
    slow: Engine, deployment: Deployment
) -> None:
    """Each hears of it once, its place is free, and the engine computes it no longer."""

    async def test() -> None:
        lossy = EngineReplicas([slow])
        client = Client(lossy, slow.config)
        running, waiting, new = (request(deployment, (1,), max_tokens=200) for _ in range(3))
        client.submit(running)
        await until(lambda: len(client.outputs[running.request_id]) > 1)
        client.submit(waiting)
        await until(lambda: len(lossy.open) == 2)
        client.submit(new)
        client.engine.abort(new.request_id)  # its task has not begun
        for each in (waiting, running):
            client.engine.abort(each.request_id)
            client.engine.abort(each.request_id)
        await client.all_ended()
        for each in (running, waiting, new):
            assert client.outputs[each.request_id][-1].finish_reason is FinishReason.ABORT
        assert [len(client.outputs[each.request_id]) for each in (waiting, new)] == [1, 1]
        assert client.counts.finished_by == {FinishReason.ABORT: 3}
        assert client.counts.num_started == 1
        assert client.counts.outcomes == {}
        assert client.num_flushes == 3
        assert client.num_admitted == 0
        client.engine.abort("unknown")
        await until(lambda: not len(slow._core._requests))

    run(test)


def test_stop_ends_every_request_with_an_error(slow: Engine, deployment: Deployment) -> None:
    """From any thread; nothing is accepted after it."""

    async def test() -> None:
        client = Client(EngineReplicas([slow]), slow.config)
        asked = [request(deployment, (1,), max_tokens=200) for _ in range(3)]
        client.submit(*asked)
        await until(lambda: len(client.outputs[asked[0].request_id]) > 1)
        await asyncio.to_thread(client.engine.stop)
        await client.all_ended()
        ends = [client.outputs[each.request_id][-1] for each in asked]
        assert {each.finish_reason for each in ends} == {FinishReason.ERROR}
        assert {each.error for each in ends} == {"the engine stopped"}
        assert client.num_admitted == 0
        assert not client.engine.is_running
        assert not client.engine.is_ready

    run(test)
