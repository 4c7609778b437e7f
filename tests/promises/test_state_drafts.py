"""Drafts of models whose layers keep states: their snapshots, slots and faults.

The references are the same requests without drafts. `test_any_serving.py` has random drafts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Output, Request
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Result,
    answer,
    checkpoint_of,
    deployment_of,
    random_tokens,
    request,
)
from tests.oracles.draft_adversary import Adversary, Counted, tell

MOST = 15
SCHEMA = {
    "type": "object",
    "properties": {"a_long_name": {"enum": [True, False]}, "another_name": {"const": "text"}},
    "required": ["a_long_name", "another_name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def hybrid(request: pytest.FixtureRequest) -> Checkpoint:
    """A tiny model of each kind of state: a delta rule with a convolution, and one alone."""
    return checkpoint_of(tiny_model(request.param))


def _served(
    engines: EngineFactory, checkpoint: Checkpoint, asked: Sequence[Request], **config: Any
) -> tuple[list[Result], Counted]:
    counted = Counted()
    engine = engines.over(checkpoint, observer=counted, **config)
    results = answer(engine, *asked)
    engine.stop()  # a step is counted after its last output
    return results, counted


def test_right_drafts_save_steps(
    hybrid: Checkpoint, engines: EngineFactory, adversary: type[Adversary]
) -> None:
    """Sixteen tokens take one step."""
    asked = [request(deployment_of(hybrid), [7, 8, 9], max_tokens=55, logprobs=1)]
    plain, _ = _served(engines, hybrid, asked)
    tell(adversary, 1, 1.0, list(zip(asked, plain, strict=True)))
    adversary.rng.randint = lambda _, most: most  # type: ignore[method-assign]
    drafted, counted = _served(engines, hybrid, asked, max_draft_tokens=MOST)
    assert drafted == plain
    assert counted.num_accepted == counted.num_drafted
    assert 55 - counted.num_accepted <= 55 // 16 + 3


@pytest.mark.parametrize("share_right", [0.6, 1.0])
def test_a_next_turn_begins_where_it_does_without_drafts(
    hybrid: Checkpoint, engines: EngineFactory, adversary: type[Adversary], share_right: float
) -> None:
    """Snapshots at page boundaries inside drafts are those of single steps, to the bit."""
    deployment = deployment_of(hybrid)
    found: list[list[int]] = []
    results: list[list[Result]] = []
    for most in (0, MOST):
        engine = engines.over(hybrid, max_draft_tokens=most)
        prompt, known = random_tokens(30), []
        found.append([])
        results.append([])
        for turn in range(4):
            asked = request(deployment, prompt, max_tokens=37 + turn, logprobs=2)
            if most:
                tell(adversary, turn, share_right, [(asked, results[0][turn])])
                if share_right == 1.0:  # the first answer ends in a draft that ends a page, too
                    adversary.rng.randint = lambda _, most: most  # type: ignore[method-assign]
            (outputs,) = engine.generate([asked])
            known.append(Result.of(outputs))
            found[-1].append(outputs[-1].num_cached_tokens)
            prompt = [*prompt, *known[-1].token_ids, *random_tokens(5, 100 + turn)]
        results[-1] = known
    assert results[0] == results[1]
    assert found[0] == found[1]
    assert found[0][-1] > 100


def test_slots_are_free_after_an_abort_inside_a_draft(
    hybrid: Checkpoint, engines: EngineFactory, adversary: type[Adversary]
) -> None:
    """The neighbour's answer stays the same."""
    deployment = deployment_of(hybrid)
    asked = [
        request(deployment, random_tokens(20, seed), max_tokens=50, logprobs=1) for seed in (0, 1)
    ]
    plain, _ = _served(engines, hybrid, asked)
    tell(adversary, 2, 0.9, list(zip(asked, plain, strict=True)))
    engine = engines.over(hybrid, max_draft_tokens=MOST)
    outputs: list[Output] = []
    ended = [Event(), Event()]

    def abort(output: Output) -> None:
        if output.token_ids and output.finish_reason is None:
            engine.abort(asked[0].request_id)
        elif output.finish_reason:
            ended[0].set()

    def keep(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason:
            ended[1].set()

    engine.submit(asked[0], abort)
    engine.submit(asked[1], keep)
    assert all(each.wait(30) for each in ended)
    engine.stop()
    assert Result.of(outputs) == plain[1]
    states: Any = engine._core.scheduler.pages.states
    assert states.pool.num_used == 0


@pytest.mark.parametrize("fails", ["forward", "right tokens"])
def test_a_shortage_of_memory_around_a_draft_changes_no_bit(
    fails: str,
    hybrid: Checkpoint,
    engines: EngineFactory,
    adversary: type[Adversary],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers have advanced their states by then; right tokens are delivered already."""
    deployment = deployment_of(hybrid)
    asked = [
        request(deployment, random_tokens(30, seed), max_tokens=40, logprobs=2) for seed in range(3)
    ]
    plain, _ = _served(engines, hybrid, asked)
    tell(adversary, 5, 0.8, list(zip(asked, plain, strict=True)))
    engine = engines.over(hybrid, max_draft_tokens=4)
    runner: Any = engine._core._runner
    prepare, advance, num_failed, num_calls = runner.prepare, runner.advance_states, 0, 0

    def short(run: Callable[[], Any], *, counts: bool) -> Any:
        nonlocal num_calls, num_failed
        num_calls += counts
        done = run()
        if counts and num_calls in {2, 9}:
            num_failed += 1
            raise torch.OutOfMemoryError("out of memory")
        return done

    def prepared(spans: Any) -> Any:
        forward = prepare(spans)
        is_drafted = fails == "forward" and any(each.states[-1].is_draft for each in spans)
        return lambda: short(forward, counts=is_drafted)

    monkeypatch.setattr(runner, "prepare", prepared)
    monkeypatch.setattr(
        runner,
        "advance_states",
        lambda parts: short(lambda: advance(parts), counts=fails == "right tokens"),
    )
    assert answer(engine, *asked) == plain
    assert num_failed == 2


@pytest.mark.usefixtures("_fixed_costs")
def test_forced_tokens_of_a_grammar_are_accepted(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """The drafter of the product finds them, and the answers are the same."""
    compiler = GrammarCompiler(hybrid.tokenizer)
    grammar = compiler.compile(compiler.text_of(SCHEMA)).result()
    deployment = deployment_of(hybrid)
    asked = [
        replace(
            request(deployment, [7, seed], max_tokens=58, temperature=1.0, seed=seed, logprobs=2),
            grammar=grammar,
        )
        for seed in range(3)
    ]
    plain, none = _served(engines, hybrid, asked)
    drafted, counted = _served(engines, hybrid, asked, max_draft_tokens=None)
    assert drafted == plain
    assert all(json.loads(each.text)["another_name"] == "text" for each in drafted)
    assert none.num_drafted == 0
    assert counted.num_accepted > 60


@pytest.mark.usefixtures("_fixed_costs")
def test_drafts_wait_while_snapshots_need_the_last_slot(
    hybrid: Checkpoint, engines: EngineFactory
) -> None:
    """One sequence has drafts from three slots on, of which one is a snapshot's."""
    asked = [request(deployment_of(hybrid), [7, 8, 9], max_tokens=55, logit_bias=((5, 90.0),))]
    numbers: dict[int, Counted] = {}
    for num_slots in (1, 2, 3):
        _, numbers[num_slots] = _served(
            engines, hybrid, asked, max_draft_tokens=MOST, num_state_slots=num_slots
        )
    assert [each.num_accepted > 30 for each in numbers.values()] == [False, False, True]
    assert numbers[2].num_drafted == 0
