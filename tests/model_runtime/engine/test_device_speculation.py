"""Drafts on an asynchronous device: the same answers, and one step ahead between the drafts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.engine import speculator
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.model_runtime.scheduling.drafts.drafter import NO_DRAFT, Draft, Drafter
from tests.doubles.deferred_runner import CONFIG, Answers, core_of, device_of
from tests.doubles.engines import Result, deployment_of, request
from tests.doubles.random_workloads import check, serve, workload
from tests.oracles.draft_adversary import Adversary, Counted, tell, use_adversary

MOST = 7
UNUSED = 9  # a token that no answer has
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 3, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 6, "logprobs": 2},
    {"temperature": 1.0, "seed": 8, "min_tokens": 20, "stop": ("a", "e")},
]


def requests_of(
    checkpoint: Checkpoint, *samplings: dict[str, Any], policy: str = "grow"
) -> list[Request]:
    """Requests whose tiers change while they decode, unless they are fixed."""
    block = {"rope_type": "yarn", "factor": 4.0}
    deployment = deployment_of(checkpoint, rope_scaling=block, rope_policy=policy)
    return [
        request(deployment, [number, 3, 5] * 13, **{"max_tokens": 40, **each})
        for number, each in enumerate(samplings)
    ]


def served(core: EngineCore, checkpoint: Checkpoint, requests: Sequence[Request]) -> list[Result]:
    """The results of requests that arrive together; pages are checked after each step."""
    answers = Answers(core, checkpoint)
    answers.add(*requests)
    while not core.is_idle:
        core.step()
        core.check_integrity()
        for each in core.scheduler.running:
            if not each.is_decoding:
                continue  # a launched step may have the next chunk of its prompt
            most = -(-(each.num_computed + 2 + MOST) // CONFIG.page_size)
            assert len(each.pages) <= most, "a sequence holds more than the pages of one draft"
    assert core.scheduler.pool.num_used == 0
    results = answers.results()
    return [results[each.request_id] for each in requests]


@pytest.fixture
def adversary(monkeypatch: pytest.MonkeyPatch) -> type[Adversary]:
    """An adversary in the place of the drafter."""
    return use_adversary(monkeypatch)


@pytest.mark.parametrize(
    ("share_right", "samplings"),
    [(0.0, MIXED[:3]), (0.5, MIXED[2:]), (0.9, MIXED[:3]), (1.0, MIXED[:1]), (1.0, MIXED[2:])],
)
def test_no_draft_changes_an_answer(
    share_right: float,
    samplings: list[dict[str, Any]],
    llama_checkpoint: Checkpoint,
    adversary: type[Adversary],
) -> None:
    """Greedy, drawn, cut, penalised and reported tokens are those of a device without drafts."""
    asked = requests_of(llama_checkpoint, *samplings)
    plain = served(core_of(llama_checkpoint, is_ahead=True), llama_checkpoint, asked)
    counted = Counted()
    for seed in range(3):
        tell(adversary, seed, share_right, list(zip(asked, plain, strict=True)))
        core = core_of(llama_checkpoint, is_ahead=True, max_draft_tokens=MOST, observer=counted)
        assert served(core, llama_checkpoint, asked) == plain
    assert counted.num_drafted > 20
    share = counted.num_accepted / counted.num_drafted
    assert share < 0.1 if share_right == 0.0 else share > 0.1
    assert share_right < 1.0 or share > 0.8


@pytest.mark.parametrize("first_seed", [0, 6])
def test_drafts_between_launched_steps_change_no_answer(
    llama_checkpoint: Checkpoint, first_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests, with drafts that come, are right, and are wrong at random."""
    adversary, counted, num_followed = use_adversary(monkeypatch), Counted(), 0
    monkeypatch.setattr(adversary, "share_silent", 0.7)
    for seed in range(first_seed, first_seed + 6):
        work = workload(llama_checkpoint, seed)
        expected, _ = serve(llama_checkpoint, work, is_ahead=False)
        results = expected.results()
        requests = [each for arrived in work.arrivals.values() for each in arrived]
        tell(adversary, seed, 0.8, [(each, results[each.request_id]) for each in requests])
        answers, core = serve(
            llama_checkpoint, work, is_ahead=True, max_draft_tokens=7, observer=counted
        )
        num_followed += device_of(core).num_followed
        check(answers, expected)
    assert num_followed > 40, "the engine was hardly ever ahead"
    assert 40 < counted.num_accepted < counted.num_drafted


class Until(Adversary):
    """Right drafts as long as the answer is short."""

    def propose(
        self, token_ids: Sequence[int], num_prompt: int, most: int, forced_ids: Sequence[int] = ()
    ) -> Draft:
        """Return a right draft within the first 20 tokens."""
        if len(token_ids) - num_prompt >= 20:
            return NO_DRAFT
        return super().propose(token_ids, num_prompt, most, forced_ids)


def test_the_engine_is_ahead_again_after_the_last_draft(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts wait for the tokens before them, and no other step does."""
    use_adversary(monkeypatch)
    monkeypatch.setattr(speculator, "Drafter", Until)
    asked = requests_of(llama_checkpoint, {"ignore_eos": True}, policy="fixed")
    plain = served(core_of(llama_checkpoint, is_ahead=True), llama_checkpoint, asked)
    tell(Until, 1, 1.0, list(zip(asked, plain, strict=True)))
    counted = Counted()
    core = core_of(llama_checkpoint, is_ahead=True, max_draft_tokens=MOST, observer=counted)
    answers = Answers(core, llama_checkpoint)
    answers.add(*asked)
    (outputs,) = answers.outputs.values()
    was_ahead: list[tuple[int, bool]] = []
    while not core.is_idle:
        core.step()
        was_ahead.append((len(outputs), core._in_flight is not None))
    assert list(answers.results().values()) == plain
    assert counted.num_accepted > 10
    assert not any(is_ahead for num, is_ahead in was_ahead if 0 < num < 20)
    # The last draft may end at 20 + MOST. Nothing follows the token that is known to be the last.
    assert all(is_ahead for num, is_ahead in was_ahead if 20 + MOST < num < 39)
    assert device_of(core).num_followed >= 39 - 20 - MOST


class Wrong(Drafter):
    """Finds a match in every text, which no answer follows."""

    def propose(
        self, token_ids: Sequence[int], num_prompt: int, most: int, forced_ids: Sequence[int] = ()
    ) -> Draft:
        """Return a wrong draft, outside of pauses."""
        return NO_DRAFT if len(token_ids) < self._pause.begins else self._draft([UNUSED] * most, 0)


def test_expected_drafts_that_are_wrong_leave_the_engine_ahead(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for a draft that never comes counts as a wrong draft, so there is a pause."""
    monkeypatch.setattr(speculator, "Drafter", Wrong)
    asked = requests_of(
        llama_checkpoint,
        {"ignore_eos": True, "max_tokens": 150, "logit_bias": ((UNUSED, -100.0),)},
        policy="fixed",
    )
    plain_core = core_of(llama_checkpoint, is_ahead=True)
    plain = served(plain_core, llama_checkpoint, asked)
    counted = Counted()
    core = core_of(llama_checkpoint, is_ahead=True, max_draft_tokens=MOST, observer=counted)
    assert served(core, llama_checkpoint, asked) == plain
    assert counted.num_accepted == 0
    num_ahead = device_of(plain_core).num_followed
    assert num_ahead >= 140
    assert device_of(core).num_followed > num_ahead - 30


def spoilt(core: EngineCore, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None]) -> None:
    """Let a function change the logits of the first step with several rows of one sequence."""
    runner = device_of(core).runner
    real = runner.prepare

    def prepare(spans: Sequence[Span], token_S: torch.Tensor | None = None) -> Any:
        forward = real(spans, token_S)
        pages = [id(span.pages) for span in spans]
        if len(set(pages)) == len(pages):
            return forward
        monkeypatch.setattr(runner, "prepare", real)

        def run() -> torch.Tensor:
            logits_RV = forward().clone()
            spoil(logits_RV)
            return logits_RV

        return run

    monkeypatch.setattr(runner, "prepare", prepare)


@pytest.mark.parametrize(("share_right", "is_failed"), [(0.0, False), (1.0, True)])
def test_a_row_that_is_not_finite_counts_only_if_its_token_is_next(
    share_right: float,
    is_failed: bool,  # noqa: FBT001
    llama_checkpoint: Checkpoint,
    adversary: type[Adversary],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row behind a wrong token is never read, whatever it holds."""
    asked = requests_of(llama_checkpoint, {"logit_bias": ((UNUSED, -100.0),)})
    plain = served(core_of(llama_checkpoint, is_ahead=True), llama_checkpoint, asked)
    tell(adversary, 1, share_right, list(zip(asked, plain, strict=True)))
    if not share_right:  # no token is right by chance
        adversary.rng.randrange = lambda *_: UNUSED  # type: ignore[method-assign, assignment]
    core = core_of(llama_checkpoint, is_ahead=True, max_draft_tokens=MOST)

    def spoil(logits_RV: torch.Tensor) -> None:
        assert len(logits_RV) > 1
        logits_RV[1:] = torch.nan

    spoilt(core, monkeypatch, spoil)
    (result,) = served(core, llama_checkpoint, asked)
    if is_failed:
        assert result.finish_reason is FinishReason.ERROR
        assert result.token_ids == plain[0].token_ids[: len(result.token_ids)]
    else:
        assert result == plain[0]
