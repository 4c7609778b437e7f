"""Drafts change no token, no logprob and no page: whatever they contain, and however many."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.engine import speculator
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.rope import POLICIES
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, request
from tests.fixed_costs import fix_step_costs
from tests.oracles.draft_adversary import Adversary, Counted, take_all, tell, use_adversary

MOST = 15


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts that pay, and so their number, must not follow the load of the machine."""
    fix_step_costs(monkeypatch)


@pytest.fixture
def adversary(monkeypatch: pytest.MonkeyPatch) -> type[Adversary]:
    """An adversary in the place of the drafter."""
    return use_adversary(monkeypatch)


SAMPLING: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": 1},
    {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "logit_bias": ((5, 2.0), (9, -3.0))},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "min_tokens": 7},
    {"stop": ("a", "e"), "temperature": 1.0, "seed": 11},
]


def served(
    engines: EngineFactory, checkpoint: Checkpoint, requests: Sequence[Request], **config: Any
) -> tuple[list[Result], Counted]:
    """The results of the requests, served together by a new engine."""
    counted = Counted()
    engine = engines.over(checkpoint, observer=counted, **config)
    results = answer(engine, *requests)
    engine.stop()  # a step is counted after its last output
    return results, counted


@dataclass(frozen=True)
class Case:
    """The requests and drafts of one run."""

    seed: int
    share_right: float  # of the drafts' tokens
    most: int  # tokens of a draft
    pages: int
    page_size: int
    policy: str


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    share_right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    most=st.sampled_from([1, 4, MOST]),
    pages=st.sampled_from([14, 256]),
    page_size=st.sampled_from([4, 16]),
    policy=st.sampled_from(POLICIES),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_no_draft_changes_an_answer(
    case: Case,
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    adversary: type[Adversary],
) -> None:
    """Tokens, logprobs and texts are equal: under preemption, in crowds, and across tiers."""
    rng = random.Random(case.seed)
    deployment = deployment_of(
        llama_checkpoint, rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_policy=case.policy
    )
    asked = []
    for _ in range(4):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([3, 16, 40, 60]))]
        params = {"max_tokens": rng.randint(1, 60), **rng.choice(SAMPLING)}
        asked.append(request(deployment, prompt, **params))
    num_tokens = 16 * case.pages
    config = {"kv_cache_tokens": num_tokens, "max_model_len": min(num_tokens, 256)}
    config["page_size"] = case.page_size
    plain, _ = served(engines, llama_checkpoint, asked, **config)
    tell(adversary, case.seed, case.share_right, list(zip(asked, plain, strict=True)))
    config["max_draft_tokens"] = case.most
    drafted, counted = served(engines, llama_checkpoint, asked, **config)
    assert drafted == plain
    if case.share_right == 0.0 and case.most == 1:
        assert counted.num_accepted <= counted.num_drafted // 4  # by chance


@pytest.mark.parametrize(
    "positions",
    [None, {"method": "rerope", "window": 24}, {"method": "sinks", "sinks": 4, "window": 40}],
    ids=str,
)
def test_right_drafts_save_steps(
    positions: dict[str, Any] | None,
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    adversary: type[Adversary],
) -> None:
    """Sixteen tokens take one step; the answers of position methods are the same, too."""
    block: dict[str, Any] = {"rope_type": "default"}
    options: dict[str, Any] = {}
    if positions is not None:
        block["positions"] = {**positions, "when": "always"}
        options["max_model_len"] = 256
    deployment = deployment_of(llama_checkpoint, rope_scaling=block, **options)
    num_tokens = 40 if positions is None else 150
    asked = [request(deployment, [7, 8, 9], max_tokens=num_tokens, logprobs=1)]
    plain, _ = served(engines, llama_checkpoint, asked)
    tell(adversary, 1, 1.0, list(zip(asked, plain, strict=True)))
    adversary.rng.randint = lambda _, most: most  # type: ignore[method-assign]
    drafted, counted = served(engines, llama_checkpoint, asked, max_draft_tokens=MOST)
    assert drafted == plain
    num_steps = num_tokens - counted.num_accepted
    assert num_steps <= num_tokens // 16 + 3
    assert counted.num_accepted == counted.num_drafted


def test_the_own_drafts_of_a_repetitive_answer_are_right(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """An answer of one token is a period, which n-grams find."""
    deployment = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "default"})
    asked = [request(deployment, [7, 8, 9], max_tokens=55, logit_bias=((5, 90.0),))]
    plain, none = served(engines, llama_checkpoint, asked)
    drafted, counted = served(engines, llama_checkpoint, asked, max_draft_tokens=MOST)
    assert drafted == plain
    assert none.num_drafted == 0
    assert counted.num_accepted > 30


def test_forced_tokens_of_a_grammar_are_accepted(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Keys and braces of a schema take fewer steps, and the answer is the same."""
    schema = {
        "type": "object",
        "properties": {"a_long_name": {"enum": [True, False]}, "another_name": {"const": "text"}},
        "required": ["a_long_name", "another_name"],
        "additionalProperties": False,
    }
    compiler = GrammarCompiler(llama_checkpoint.tokenizer)
    grammar = compiler.compile(compiler.text_of(schema)).result()
    deployment = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "default"})
    asked = [
        replace(
            request(deployment, [7, seed], max_tokens=55, temperature=1.0, seed=seed),
            grammar=grammar,
        )
        for seed in range(3)
    ]
    plain, _ = served(engines, llama_checkpoint, asked)
    drafted, counted = served(engines, llama_checkpoint, asked, max_draft_tokens=MOST)
    assert drafted == plain
    assert all(json.loads(each.text)["another_name"] == "text" for each in drafted)
    assert counted.num_accepted > 60


def test_a_prediction_is_accepted(engines: EngineFactory, llama_checkpoint: Checkpoint) -> None:
    """The last output counts the tokens that were chosen and those that were not."""
    deployment = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "default"})
    asked = request(deployment, [3, 1, 4, 1, 5], max_tokens=40, temperature=1.0, seed=3, logprobs=0)
    engine = engines.over(llama_checkpoint, max_draft_tokens=MOST)
    (plain,) = engine.generate([asked])
    token_ids = tuple(token for output in plain for token in output.token_ids)
    (predicted,) = engine.generate(
        [replace(asked, request_id="predicted", prediction_ids=token_ids)]
    )
    assert Result.of(predicted) == Result.of(plain)
    accepted, rejected = predicted[-1].drafts
    assert accepted > 20
    assert accepted + rejected <= 3 * 40
    assert all(output.drafts == (0, 0) for output in predicted[:-1])


def test_a_right_token_that_ends_the_answer_is_accepted(
    engines: EngineFactory, llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop string in the middle of a right draft; the tokens behind it are rejected."""
    deployment = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "default"})
    asked = request(deployment, [3, 1, 4, 1, 5], max_tokens=40, temperature=1.0, seed=3)
    engine = engines.over(llama_checkpoint, max_draft_tokens=MOST)
    (plain,) = engine.generate([asked])
    token_ids = tuple(token for output in plain for token in output.token_ids)
    monkeypatch.setattr(speculator, "take", take_all)
    stop = llama_checkpoint.tokenizer.decode([token_ids[3]])
    assert stop not in llama_checkpoint.tokenizer.decode(list(token_ids[:3]))
    sampling = replace(asked.sampling, stop=(stop,))
    for num_predicted, counts in ((4, (3, 0)), (5, (3, 1))):
        ids = token_ids[:num_predicted]
        again = replace(asked, request_id=f"{ids}", sampling=sampling, prediction_ids=ids)
        (ended,) = engine.generate([again])
        assert Result.of(ended).token_ids == token_ids[:4]
        assert ended[-1].drafts == counts


@pytest.mark.parametrize(("asked_for", "is_drafted"), [(None, False), (MOST, True)])
def test_a_model_whose_rows_depend_on_the_batch_has_drafts_only_if_asked(
    asked_for: int | None,
    is_drafted: bool,  # noqa: FBT001
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
) -> None:
    """A draft beside a row could change its token, so the default is none."""
    report = replace(llama_checkpoint.report, bitwise=False)
    rounding = replace(llama_checkpoint, report=report)
    deployment = deployment_of(rounding, rope_scaling={"rope_type": "default"})
    asked = [request(deployment, [7, 8, 9], max_tokens=55, logit_bias=((5, 90.0),))]
    _, counted = served(engines, rounding, asked, max_draft_tokens=asked_for)
    assert (counted.num_drafted > 0) is is_drafted


def test_drafts_are_the_default_where_no_bit_changes(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The self-check has shown that rows do not depend on the batch."""
    deployment = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "default"})
    asked = [request(deployment, [7, 8, 9], max_tokens=55, logit_bias=((5, 90.0),))]
    _, counted = served(engines, llama_checkpoint, asked, max_draft_tokens=None)
    assert counted.num_accepted > 30
