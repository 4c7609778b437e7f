"""Answers of the tokens that a request allows, in every kind of step, and under a grammar."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.model_runtime.runner.token_mask import token_mask
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from tests.doubles.deferred_runner import END, Answers, core_of, device_of
from tests.doubles.engines import EngineFactory, Result, deployment_of, request
from tests.oracles.draft_adversary import use_adversary

ALLOWED = (3, 12, 30, 31, 32, 50, 99, 150, 198)
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 3, "top_p": 0.9, "top_k": 5, "logit_bias": ((5, 100.0),)},
    {"temperature": 1.0, "seed": 8, "ignore_eos": True, "allowed": None},
]
WITH_MEMORY: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "bad_words": ((12, 30),)},
    {"temperature": 0.8, "seed": 6, "logprobs": 2},
]


def requests_of(checkpoint: Checkpoint, samplings: Sequence[dict[str, Any]]) -> list[Request]:
    """Requests of these tokens, unless their sampling says others."""
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    return [
        request(
            deployment,
            [number, 3, 5] * 4,
            **{"max_tokens": 30, "allowed": token_mask(ALLOWED), **each},
        )
        for number, each in enumerate(samplings)
    ]


def served(core: EngineCore, checkpoint: Checkpoint, requests: Sequence[Request]) -> list[Result]:
    """The results of requests that arrive together."""
    answers = Answers(core, checkpoint)
    answers.add(*requests)
    answers.finish()
    return [answers.results()[each.request_id] for each in requests]


@pytest.mark.parametrize("way", ["ahead", "drafts", "drafts at once"])
def test_every_kind_of_step_has_allowed_tokens_only(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The answers are those of an engine that computes one token a step, and waits for it."""
    samplings = SAMPLINGS if way != "drafts" else SAMPLINGS + WITH_MEMORY
    asked = requests_of(llama_checkpoint, samplings)
    expected = served(core_of(llama_checkpoint, is_ahead=False), llama_checkpoint, asked)
    for each, result in zip(asked, expected, strict=True):
        assert each.sampling.allowed is None or set(result.token_ids) <= set(ALLOWED)
        assert result.finish_reason is FinishReason.LENGTH, "no end token is allowed"
    assert len(set(expected[1].token_ids)) > 3
    if way != "ahead":
        adversary = use_adversary(monkeypatch)
        adversary.rng, adversary.share_right, adversary.answers = random.Random(1), 0.7, {}
        for each, result in zip(asked, expected, strict=True):
            adversary.answers[each.prompt_ids] = [result.token_ids]
    num_drafts = 0 if way == "ahead" else 5
    core = core_of(llama_checkpoint, is_ahead=way != "drafts", max_draft_tokens=num_drafts)
    assert served(core, llama_checkpoint, asked) == expected
    if way == "ahead":
        assert device_of(core).num_followed > 20, "such a request is launched ahead"


def test_an_end_token_comes_if_it_is_allowed(llama_checkpoint: Checkpoint) -> None:
    """min_tokens bars it, and bars nothing else."""
    end = next(iter(END))
    (asked,) = requests_of(llama_checkpoint, [{"allowed": token_mask((end,))}])
    (found,) = served(core_of(llama_checkpoint, is_ahead=False), llama_checkpoint, [asked])
    assert (found.token_ids, found.finish_reason) == ((end,), FinishReason.STOP)
    fields = {"allowed": token_mask((end, 30)), "min_tokens": 4, "logit_bias": ((end, 100.0),)}
    (asked,) = requests_of(llama_checkpoint, [fields])
    (found,) = served(core_of(llama_checkpoint, is_ahead=False), llama_checkpoint, [asked])
    assert found.token_ids == (30, 30, 30, 30, end)


def test_end_tokens_alone_cannot_fill_min_tokens(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """No token could come."""
    engine = engines.over(llama_checkpoint)
    fields = {"allowed": token_mask((30, 31)), "stop_token_ids": (30, 31), "min_tokens": 4}
    (asked,) = requests_of(llama_checkpoint, [fields])
    with pytest.raises(RequestError, match=r"must be 0, because each of .* Given: 4") as error:
        engine.submit(asked, lambda _: None)
    assert error.value.param == "min_tokens"


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize(
    ("schema", "letters", "expected"),
    [
        ({"enum": [12, 34, 112]}, "123", ("12|112", FinishReason.STOP)),
        ({"type": "integer", "minimum": 1}, "12", ("[12]{12}", FinishReason.LENGTH)),
        ({"enum": [12, 34]}, "15", ("1", FinishReason.REFUSED)),
    ],
)
def test_a_grammar_and_the_request_both_allow_a_token(
    llama_checkpoint: Checkpoint,
    num_drafts: int,
    schema: dict[str, Any],
    letters: str,
    expected: tuple[str, FinishReason],
) -> None:
    """An answer that is complete ends without an end token. If none is left, it is refused."""
    compiler = GrammarCompiler(llama_checkpoint.tokenizer)
    grammar = compiler.compile(compiler.text_of(schema)).result()
    ids = tuple(llama_checkpoint.tokenizer.encode(letters))
    fields = {"allowed": token_mask(ids), "temperature": 1.0, "max_tokens": 12}
    asked = requests_of(llama_checkpoint, [{**fields, "seed": seed} for seed in range(4)])
    asked = [replace(each, grammar=grammar) for each in asked]
    core = core_of(llama_checkpoint, is_ahead=False, max_draft_tokens=num_drafts)
    for found in served(core, llama_checkpoint, asked):
        assert set(found.token_ids) <= set(ids)
        assert re.fullmatch(expected[0], found.text)
        assert found.finish_reason is expected[1]
