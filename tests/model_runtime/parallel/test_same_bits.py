"""A model on several ranks answers with the bits of one rank."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine, build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.page_groups import group_layers
from ropewalk.model_runtime.parallel.ranks import Ranks
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.sampler import SamplingRow
from ropewalk.rope import Linear, Profile, ReRope, Unscaled
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import EngineFactory, Preemptions, answer, deployment_of, request
from tests.model_runtime.parallel.divided_models import DIVIDED, divided, whole
from tests.oracles.draft_adversary import Counted, tell, use_adversary

CONFIG = EngineConfig(kv_cache_tokens=16 * 16, max_model_len=128, page_size=16, num_rope_tables=2)
LONG = torch.randint(VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(1)).tolist()
SHORT = LONG[:20][::-1]
# One with each kind of layer that divides otherwise: joined, gated, full width, biases, norms.
ON_TWO, ON_FOUR = ("cohere", "gemma3", "gpt_neox", "starcoder2"), ("phi", "qwen3", "nemotron")
PROFILES = Profile(Unscaled()), Profile(Linear(factor=2.0))


def logits(runner: ModelRunner, profiles: Sequence[Profile] = PROFILES) -> list[Tensor]:
    """The logits of steps of every kind, in order; later ones read what earlier ones wrote."""
    plain, scaled = map(runner.table_id, profiles)

    def span(
        token_ids: Sequence[int],
        first: int,
        pages: Sequence[int],
        table: int = plain,
        *,
        is_last_only: bool = False,
    ) -> Span:
        num, num_groups = len(token_ids), runner.store.num_groups
        row = [page * num_groups + group for page in pages for group in range(num_groups)]
        return Span(token_ids, first, row, table, range(num - 1 if is_last_only else 0, num))

    own, other, again = [0, 1, 2, 3], [4, 5], [9, 8, 7, 6]
    steps = [
        # alone, and with the last layer pruned
        [span(LONG, 0, own)],
        [span(LONG, 0, own, is_last_only=True)],
        # in a batch of two tiers
        [span(LONG[:31], 0, own, scaled), span(SHORT, 0, other)],
        # in chunks, beside a decode
        [span(LONG[31:41], 31, own, scaled), span([7], len(SHORT), other)],
        [span([LONG[41]], 41, own, scaled), span([8], len(SHORT) + 1, other)],
        # after preemption: the same tokens in other pages and other chunks
        [span(LONG[:17], 0, again, scaled), span(SHORT, 0, other)],
        [span(LONG[17:42], 17, again, scaled)],
        # after a prefix hit: pages that another sequence has written
        [span([*LONG[32:40], 3, 4, 5], 32, [*again[:2], 10], scaled)],
    ]
    return [runner.run(spans).clone() for spans in steps]


def compare(
    ranks: Ranks, alone: Checkpoint, shared: Checkpoint, profiles: Sequence[Profile] = PROFILES
) -> None:
    """Compare all steps, to the bit if the ranks say so; else within the self-check's bound.

    On the ranks, pages hold groups of layers if some read a window.
    """
    expected = logits(build_runner(alone, CONFIG), profiles)
    groups, _ = group_layers(shared.windows, shared.plans, CONFIG.max_model_len)
    config = replace(CONFIG, page_groups=groups)
    found = logits(build_runner(shared, config, make=ranks.runner), profiles)
    for step, (got_RV, wanted_RV) in enumerate(zip(found, expected, strict=True)):
        assert got_RV.shape == wanted_RV.shape
        if ranks.has_same_bits:
            assert torch.equal(got_RV, wanted_RV), f"step {step}"
        else:
            assert float((got_RV - wanted_RV).abs().max()) <= alone.report.threshold, f"step {step}"


@pytest.mark.parametrize(
    ("ranks", "architecture"),
    [
        *((2, each) for each in ON_TWO),
        *((4, each) for each in ON_FOUR),
        *(pytest.param(4, each, marks=pytest.mark.long) for each in DIVIDED if each not in ON_FOUR),
    ],
    indirect=["ranks"],
)
def test_logits_on_ranks_are_those_of_one_process(ranks: Ranks, architecture: str) -> None:
    """In float32: alone, in batches, chunks and tiers, after preemption and prefix hits."""
    shared = divided(ranks, architecture)
    compare(ranks, whole(architecture), shared)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_position_methods_read_alike_on_ranks(ranks: Ranks) -> None:
    """The followers get the method with the profile."""
    profiles = PROFILES[0], Profile(Unscaled(), None, ReRope(window=16))
    compare(ranks, whole("llama"), divided(ranks, "llama"), profiles)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_bfloat16_logits_are_those_of_one_process(ranks: Ranks) -> None:
    """To the bit if this processor's products allow it, which the ranks say."""
    compare(ranks, whole("llama", "bfloat16"), divided(ranks, "llama", "bfloat16"))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_an_engine_on_ranks_gives_the_same_answers(
    ranks: Ranks, engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests share prefixes and are preempted; their logprobs are the same numbers."""
    observers = Preemptions(), Preemptions()
    small = {"kv_cache_tokens": 24 * 16, "max_model_len": 256}
    alone = whole("llama")
    plain = engines.over(alone, observer=observers[0], **small)
    shared = divided(ranks, "llama")
    monkeypatch.setattr(
        "tests.doubles.engines.build_engine", partial(build_engine, make=ranks.runner)
    )
    mirrored = engines.over(shared, observer=observers[1], **small)
    deployment = deployment_of(alone, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    prompts = [[*LONG[:32], *range(number, number + 40)] for number in range(8)]
    results = [
        answer(
            engine,
            *(
                request(
                    deployment,
                    prompt,
                    max_tokens=40,
                    ignore_eos=True,
                    temperature=1.0,
                    seed=number,
                    logprobs=3,
                    prompt_logprobs=1,
                )
                for number, prompt in enumerate(prompts)
            ),
        )
        for engine in (plain, mirrored)
    ]
    assert min(each.num for each in observers) > 0, "nothing was preempted"
    if ranks.has_same_bits:
        assert results[0] == results[1]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_drafts_on_ranks_change_no_answer(
    ranks: Ranks, engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The followers compute the rows of drafts, which are right and wrong at random."""
    alone, shared = whole("llama"), divided(ranks, "llama")
    deployment = deployment_of(alone, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    asked = [
        request(deployment, LONG[:number], max_tokens=40, temperature=heat, seed=number, logprobs=1)
        for number, heat in ((7, 0.0), (20, 1.0), (33, 0.8))
    ]
    plain = answer(engines.over(alone), *asked)
    adversary = use_adversary(monkeypatch)
    tell(adversary, 3, 0.8, list(zip(asked, plain, strict=True)))
    monkeypatch.setattr(
        "tests.doubles.engines.build_engine", partial(build_engine, make=ranks.runner)
    )
    counted = Counted()
    engine = engines.over(shared, observer=counted, max_draft_tokens=15)
    drafted = answer(engine, *asked)
    engine.stop()  # a step is counted after its last output
    assert 10 < counted.num_accepted < counted.num_drafted
    if ranks.has_same_bits:
        assert drafted == plain


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_launched_step_takes_tokens_from_the_first_rank(ranks: Ranks) -> None:
    """The followers receive the tokens that only the first rank has sampled."""
    runners = [build_runner(whole("llama"), CONFIG)]
    runners.append(build_runner(divided(ranks, "llama"), CONFIG, make=ranks.runner))
    told = []
    for runner in runners:
        table = runner.table_id(PROFILES[0])
        runner.run(
            [Span(LONG, 0, [0, 1, 2, 3], table, range(1)), Span(SHORT, 0, [4, 5], table, ())]
        )
        rows = [SamplingRow(SamplingParams(temperature=0.0), 0, frozenset())] * 2

        def decode(num_before: int, token: int, table: int = table) -> list[Span]:
            return [
                Span([token], len(LONG) + num_before, [0, 1, 2, 3], table, range(1)),
                Span([token], len(SHORT) + num_before, [4, 5], table, range(1)),
            ]

        first = runner.launch(decode(0, 9), rows, None)
        second = runner.launch(decode(1, 0), rows, (first, [0, 1]))
        third = runner.launch(decode(2, 0), rows, (second, [0, 1]))
        prompt = Span(SHORT, 0, [6, 7], table, range(len(SHORT) - 1, len(SHORT)))
        mixed = [*decode(3, 0)[::-1], prompt]
        fourth = runner.launch(mixed, [*rows, *rows[:1]], (third, [1, 0]))
        told.append([each.read() for each in (first, second, third, fourth)])
    assert told[0] == told[1]
    assert len({token for _, tokens in told[0] for token in tokens}) > 1
