"""A request whose values cannot be sampled with ends alone, and the others keep their tokens.

The routes refuse such values. The engine does not rely on it.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.errors import GrammarError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.text.grammar import Constraint
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.deferred_runner import Answers, core_of
from tests.doubles.engines import Result, deployment_of, request
from tests.oracles.draft_adversary import use_adversary

BEYOND = VOCAB_SIZE + 50
FAULTS: list[dict[str, Any]] = [
    {"logit_bias": ((BEYOND, 1.0),)},
    {"bad_words": ((BEYOND,),)},
    {"bad_words": ((12, BEYOND),), "logit_bias": ((12, 100.0),)},  # the second token fails
    {"stop_token_ids": (BEYOND,), "min_tokens": 3},
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 3, "top_p": 0.9, "top_k": 20, "logit_bias": ((5, 2.0),)},
]
WITH_MEMORY: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "bad_words": ((7, 5),)},
    {"logprobs": 2, "prompt_logprobs": 1},
]


def requests_of(checkpoint: Checkpoint, samplings: Sequence[dict[str, Any]]) -> list[Request]:
    """Requests with prompts of different lengths; the last one takes two steps."""
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    return [
        request(deployment, [number, 3, 5] * (number + 1) * 3, max_tokens=20, **each)
        for number, each in enumerate(samplings)
    ]


def served(
    core: EngineCore, checkpoint: Checkpoint, requests: Sequence[Request]
) -> dict[str, Result]:
    """The results of requests that arrive together."""
    answers = Answers(core, checkpoint)
    answers.add(*requests)
    answers.finish()
    return answers.results()


@pytest.mark.parametrize("fault", FAULTS, ids="+".join)
@pytest.mark.parametrize("way", ["decodes", "mixed", "drafts", "drafts at once", "ahead"])
def test_a_row_that_cannot_be_sampled_ends_its_request_only(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, way: str, fault: dict[str, Any]
) -> None:
    """The others have the tokens that they have without it, in every kind of step."""
    samplings = OTHERS + (WITH_MEMORY if way in ("mixed", "drafts") else [])
    others = requests_of(llama_checkpoint, samplings)
    expected = served(core_of(llama_checkpoint, is_ahead=False), llama_checkpoint, others)
    if "drafts" in way:
        adversary = use_adversary(monkeypatch)
        adversary.rng, adversary.share_right, adversary.answers = random.Random(1), 0.7, {}
        adversary.answers = {
            each.prompt_ids: [expected[each.request_id].token_ids] for each in others
        }
    if way in ("drafts at once", "ahead"):  # a device whose sampling fails at the launch
        monkeypatch.setattr(ModelRunner, "is_asynchronous", property(lambda _: True))
    core = core_of(llama_checkpoint, is_ahead=False, max_draft_tokens=5 if "drafts" in way else 0)
    bad = request(deployment_of(llama_checkpoint), [9, 9], max_tokens=20, **fault)
    if "drafts" in way:
        adversary.answers[bad.prompt_ids] = [()]
    found = served(core, llama_checkpoint, [bad, *others])
    assert found.pop(bad.request_id).finish_reason is FinishReason.ERROR
    assert found == expected


def test_a_request_that_starts_among_decodes_ends_alone(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt's step has decodes of others, which are launched ahead before and after it."""
    monkeypatch.setattr(ModelRunner, "is_asynchronous", property(lambda _: True))
    others = requests_of(llama_checkpoint, OTHERS)
    expected = served(core_of(llama_checkpoint, is_ahead=False), llama_checkpoint, others)
    core = core_of(llama_checkpoint, is_ahead=False)
    answers = Answers(core, llama_checkpoint)
    answers.add(*others)
    for _ in range(5):
        core.step()
    bad = request(deployment_of(llama_checkpoint), [9, 9], max_tokens=20, **FAULTS[0])
    answers.add(bad)
    answers.finish()
    found = answers.results()
    assert found.pop(bad.request_id).finish_reason is FinishReason.ERROR
    assert found == expected


class Broken(Constraint):
    """A grammar whose state cannot be computed; it is its own constraint."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def begin(self, *_: object) -> Constraint:
        return self

    def look(self) -> bool:
        """Raise the error."""
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GrammarError("it fails"), FinishReason.REFUSED),
        (IndexError("it fails"), FinishReason.ERROR),
    ],
)
def test_a_grammar_that_fails_ends_its_request_only(
    llama_checkpoint: Checkpoint, error: Exception, reason: FinishReason
) -> None:
    """An error that no grammar should raise is the server's fault, and still this request's."""
    others = requests_of(llama_checkpoint, OTHERS)
    expected = served(core_of(llama_checkpoint, is_ahead=False), llama_checkpoint, others)
    core = core_of(llama_checkpoint, is_ahead=False)
    answers = Answers(core, llama_checkpoint)
    grammar: Any = Broken(error)
    bad = replace(request(deployment_of(llama_checkpoint), [9, 9], max_tokens=20), grammar=grammar)
    answers.add(bad, *others)
    answers.finish()
    found = answers.results()
    assert found.pop(bad.request_id).finish_reason is reason
    assert found == expected
