"""Requests that arrive, share prefixes, grow, are preempted and are aborted at random."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.rope import POLICIES
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.deferred_runner import Answers, core_of
from tests.doubles.engines import deployment_of, request

YARN = {"rope_type": "yarn", "factor": 4.0}


@dataclass
class Workload:
    """Requests with the step before which each arrives, and that before which some are aborted."""

    arrivals: dict[int, list[Request]] = field(default_factory=dict)
    aborts: dict[int, list[str]] = field(default_factory=dict)


def workload(
    checkpoint: Checkpoint, seed: int, num_shared: Sequence[int] = (1, 9, 24, 50)
) -> Workload:
    """Random requests: lengths, seeds, temperatures, cuts, stops, tiers, shared prefixes.

    `num_shared`: of the tokens that a prompt may have in common with others.
    """
    chance = random.Random(seed)
    deployments = {
        policy: deployment_of(checkpoint, rope_scaling=YARN, rope_policy=policy)
        for policy in POLICIES
    }
    made = Workload()
    for number in range(chance.randint(3, 9)):
        family = chance.randrange(2)
        prompt = [
            (family * 37 + at * (family + 3)) % VOCAB_SIZE
            for at in range(chance.choice(num_shared))
        ]
        prompt += [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(5))]
        sampling: dict[str, Any] = {
            "temperature": chance.choice((0.0, 0.0, 0.8, 1.5)),
            "seed": chance.randrange(1000),
            "max_tokens": chance.choice((0, 1, 2, 8, 30, 60)),
            "ignore_eos": chance.random() < 0.3,
            "min_tokens": chance.choice((0, 0, 5)),
        }
        if chance.random() < 0.3:
            sampling["stop"] = (chance.choice("abcdefgh"),)
        if chance.random() < 0.2:
            sampling |= {"top_p": 0.8, "top_k": 20}
        if chance.random() < 0.2:
            sampling |= chance.choice(
                ({"logprobs": 2}, {"repetition_penalty": 1.5}, {"prompt_logprobs": 1})
            )
        asked = request(deployments[chance.choice(POLICIES)], prompt, **sampling)
        asked = replace(asked, request_id=f"r{number}", priority=number % 3 - 1)
        made.arrivals.setdefault(chance.choice((0, 0, chance.randrange(60))), []).append(asked)
        if chance.random() < 0.2:
            made.aborts.setdefault(chance.randrange(80), []).append(asked.request_id)
    return made


def serve(
    checkpoint: Checkpoint,
    work: Workload,
    *,
    is_ahead: bool,
    max_draft_tokens: int = 0,
    observer: Observer | None = None,
    disturb: Callable[[EngineCore], None] = lambda _: None,
    **limits: Any,
) -> tuple[Answers, EngineCore]:
    """Serve a workload to its end; `limits`: fields of the config.

    `disturb`: called before each step until the last arrival and abort.
    """
    core = core_of(
        checkpoint,
        is_ahead=is_ahead,
        max_draft_tokens=max_draft_tokens,
        observer=observer,
        **limits,
    )
    answers = Answers(core, checkpoint)
    for step in range(max((*work.arrivals, *work.aborts), default=0) + 1):
        answers.add(*work.arrivals.get(step, ()))
        for name in work.aborts.get(step, ()):
            core.abort(name)
        core.check_integrity()
        disturb(core)
        core.step()
        core.check_integrity()
    answers.finish()
    return answers, core


def check(
    got: Answers, expected: Answers, cut: Collection[FinishReason] = (FinishReason.ABORT,)
) -> None:
    """Compare the answers to a workload; an aborted one is as long as the time allowed.

    `cut`: all reasons for which an answer may be shorter.
    """
    results = got.results()
    assert results.keys() == expected.outputs.keys()
    for name, result in expected.results().items():
        if {result.finish_reason, results[name].finish_reason} & set(cut):
            # It is cut at another token, because one of them may have waited longer.
            shorter, longer = sorted((result.token_ids, results[name].token_ids), key=len)
            assert longer[: len(shorter)] == shorter
        else:
            assert results[name] == result
