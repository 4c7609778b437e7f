"""Tokens are drawn like transformers' warpers draw, and a seed decides them in any batch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ropewalk.model_runtime.request import MAX_LOGPROBS, SamplingParams
from ropewalk.model_runtime.runner.penalties import SeenTokens, has_penalty
from ropewalk.model_runtime.runner.sampler import (
    SamplingRow,
    adjusted,
    finite_rows,
    in_one_transfer,
    logprobs,
    sample,
    sample_rows,
    sampled_on_device,
    uniform,
)
from ropewalk.model_runtime.runner.token_mask import token_mask

VOCABULARY = 40


def row_of(
    params: SamplingParams,
    num_generated: int = 0,
    prompt: Sequence[int] = (),
    generated: Sequence[int] | None = None,
    end_ids: Sequence[int] = (),
) -> SamplingRow:
    """The sampling row of a request in a given state."""
    ids = [0] * num_generated if generated is None else generated
    seen = SeenTokens(prompt, ids) if has_penalty(params) else None
    return SamplingRow(params, len(ids), frozenset(end_ids), seen)


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities after transformers' own processors."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_frequencies_match_the_reference(options: dict[str, Any]) -> None:
    """A chi-square test over 8,000 draws bounds the error; no draw leaves the support."""
    logits = torch.randn(VOCABULARY) * 2
    params = SamplingParams(**options)
    expected = reference(logits, params)
    num_draws, block = 8000, 2000
    counts = torch.zeros(VOCABULARY)
    for start in range(0, num_draws, block):
        rows = [row_of(params, step) for step in range(start, start + block)]
        for token in sample(logits.expand(block, -1), rows):
            counts[token] += 1
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - num_draws * expected) ** 2 / (num_draws * expected))[kept].sum()
    freedom = int(kept.sum()) - 1
    assert float(statistic) < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_a_seed_decides_in_any_batch() -> None:
    """The other rows of the batch have other parameters."""
    logits = torch.randn(6, VOCABULARY)
    params = [
        SamplingParams(seed=seed, temperature=0.3 * seed, top_k=seed, top_p=1 - seed / 10)
        for seed in range(6)
    ]
    rows = [row_of(each, 3) for each in params]
    together = sample(logits, rows)
    alone = [sample(logits[row : row + 1], [rows[row]])[0] for row in range(6)]
    assert together == alone


def test_temperature_zero_is_the_most_likely_token() -> None:
    """The seed has no effect at temperature zero."""
    logits = torch.randn(5, VOCABULARY)
    params = [SamplingParams(temperature=0.0, seed=seed) for seed in range(5)]
    rows = [row_of(each, step) for step, each in enumerate(params)]
    assert sample(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 9e-6, 1e-40, 5e-324])
def test_any_low_temperature_is_nearly_greedy(temperature: float) -> None:
    """A row beside one of a low temperature is sampled as alone."""
    logits = torch.randn(2, VOCABULARY) * 10
    rows = [row_of(SamplingParams(temperature=temperature)), row_of(SamplingParams(seed=1))]
    assert sample(logits, rows) == [int(logits[0].argmax()), sample(logits[1:], rows[1:])[0]]


def test_random_numbers_are_uniform_and_differ_by_seed_and_step() -> None:
    """The random numbers are uniform on [0, 1)."""
    drawn = [uniform(seed, step) for seed in range(50) for step in range(50)]
    assert len(set(drawn)) == len(drawn)
    assert 0 <= min(drawn) < 0.01
    assert 0.99 < max(drawn) < 1
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.02)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """The alternatives of a token are sorted from the likeliest down."""
    logits = torch.randn(100, VOCABULARY)
    chosen = torch.randint(VOCABULARY, (100,)).tolist()
    expected = logits.log_softmax(-1)
    entries = logprobs(logits, chosen, [3] * 99 + [0])
    for row, entry in enumerate(entries):
        assert entry.token_id == chosen[row]
        assert entry.logprob == float(expected[row, chosen[row]])
    best = expected[0].topk(3)
    assert entries[0].top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert entries[-1].top == ()
    assert len(logprobs(logits[:1], [0], [MAX_LOGPROBS])[0].top) == 20


def test_repetition_penalty_is_transformers() -> None:
    """The penalty covers the prompt and the answer."""
    logits = torch.randn(3, VOCABULARY)
    prompt, generated = [1, 2, 3, 3], [5, 6, 6]
    rows = [
        row_of(SamplingParams(repetition_penalty=penalty), prompt=prompt, generated=generated)
        for penalty in (1.0, 1.3, 0.7)
    ]
    got = adjusted(logits, rows)
    seen = torch.tensor([prompt + generated])
    for index, row in enumerate(rows):
        processor = RepetitionPenaltyLogitsProcessor(row.params.repetition_penalty)
        expected = processor(seen, logits[index : index + 1].clone())[0]
        assert torch.allclose(got[index], expected)


def test_presence_and_frequency_penalties_are_openais() -> None:
    """The answer alone is penalised, by c x frequency + (c > 0) x presence."""
    logits = torch.randn(1, VOCABULARY)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = adjusted(logits, [row_of(params, prompt=[7, 7], generated=[3, 4, 4, 4])])[0]
    expected = logits[0].clone()
    expected[3] -= 0.75
    expected[4] -= 1.25
    assert torch.allclose(got, expected)


def test_logit_bias_is_added() -> None:
    """The reference is transformers' sequence bias for single tokens."""
    logits = torch.randn(2, VOCABULARY)
    params = SamplingParams(logit_bias=((3, 5.0), (9, -100.0)))
    got = adjusted(logits, [row_of(params), row_of(SamplingParams())])
    processor = SequenceBiasLogitsProcessor([[[3], 5.0], [[9], -100.0]])
    assert torch.allclose(got[0], processor(torch.zeros(1, 1, dtype=torch.long), logits[:1])[0])
    assert torch.equal(got[1], logits[1])
    forced = SamplingParams(logit_bias=((3, 100.0),), temperature=1.0)
    assert sample(logits, [row_of(forced)] * 2) == [3, 3]


def test_no_end_token_before_min_tokens() -> None:
    """Greedy and random sampling both give no end token before min_tokens."""
    logits = torch.full((1, VOCABULARY), -5.0)
    logits[0, 4] = 20.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(min_tokens=3, temperature=temperature)
        for generated in ([], [1], [1, 2]):
            assert sample(logits, [row_of(params, generated=generated, end_ids=[4])]) != [4]
        assert sample(logits, [row_of(params, generated=[1, 2, 3], end_ids=[4])]) == [4]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 3},
        {"temperature": 0.9, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.9, "repetition_penalty": 1.5, "logit_bias": ((5, 3.0), (9, -2.0))},
        {"temperature": 0.9, "bad_words": ((13,),), "top_p": 0.9},
    ],
    ids=str,
)
def test_no_token_comes_that_is_not_allowed(options: dict[str, Any]) -> None:
    """Transformers suppresses the others, and every way to draw gives the same tokens."""
    allowed = [0, 5, 8, 13, 21, 39]
    others = [each for each in range(VOCABULARY) if each not in allowed]
    suppress = SuppressTokensLogitsProcessor(others)
    logits_RV = torch.randn(60, VOCABULARY) * 2
    expected_RV = suppress(torch.zeros(60, 1, dtype=torch.long), logits_RV)
    params = [SamplingParams(**options, seed=seed) for seed in range(60)]
    free = [row_of(each, prompt=[5, 8], generated=[13]) for each in params]
    masked = [replace(each, allowed=token_mask(allowed)) for each in free]
    tokens = sample(logits_RV, masked)
    assert tokens == sample(expected_RV, free)
    assert set(tokens) <= set(allowed)
    drawn = sampled_on_device(logits_RV, logits_RV, masked)[60:].tolist()
    assert drawn == sampled_on_device(logits_RV, expected_RV, free)[60:].tolist()
    assert set(drawn) <= set(allowed)


def test_a_row_without_a_choice_does_not_break_its_neighbours() -> None:
    """Every token of one row is banned; the other row is sampled as alone."""
    logits = torch.randn(2, VOCABULARY)
    banned = row_of(SamplingParams(min_tokens=1), end_ids=range(VOCABULARY))
    other = row_of(SamplingParams(seed=3))
    assert sample(logits, [banned, other])[1] == sample(logits[1:], [other])[0]


def test_adjusting_leaves_the_raw_logits_alone() -> None:
    """Logprobs are computed from the raw logits."""
    logits = torch.randn(2, VOCABULARY)
    before = logits.clone()
    params = SamplingParams(logit_bias=((1, 3.0),), repetition_penalty=1.5, presence_penalty=1.0)
    sample(logits, [row_of(params, prompt=[1], generated=[2])] * 2)
    assert torch.equal(logits, before)


def test_rows_that_are_not_finite_are_found() -> None:
    """NaN and both infinities are tried, alone and together."""
    logits = torch.randn(6, VOCABULARY)
    logits[1, 3] = torch.nan
    logits[2, 0] = torch.inf
    logits[3, 39] = -torch.inf
    logits[4, 7], logits[4, 8] = torch.inf, torch.nan
    assert finite_rows(logits) == logits.isfinite().all(dim=-1).tolist()
    assert finite_rows(logits[:0]) == []


def test_a_device_answers_alike_in_one_transfer() -> None:
    """Greedy, random and top-p rows are compared; a row with NaN harms no other."""
    logits = torch.randn(6, VOCABULARY)
    logits[2] = torch.nan
    places = [0, 2, 3, 5]
    drawn = SamplingParams(temperature=0.8, seed=3)
    rows = [
        row_of(SamplingParams(temperature=0.0)),
        row_of(drawn),
        row_of(drawn),
        row_of(replace(drawn, top_p=0.7)),
    ]
    told = in_one_transfer(logits, logits[places], rows)
    expected = sample_rows(logits, places, rows)
    assert told[0] == expected[0] == [True, True, False, True, True, True]
    assert [told[1][at] for at in (0, 2, 3)] == [expected[1][at] for at in (0, 2, 3)]
    assert 0 <= told[1][1] < VOCABULARY


def test_the_first_of_equal_logits_is_the_most_likely() -> None:
    """Each row has a tie of its own."""
    logits = torch.zeros(3, VOCABULARY)
    logits[1, [9, 30]] = 2.0
    logits[2] = -torch.inf
    logits[2, [5, 6]] = -1.0
    rows = [row_of(SamplingParams(temperature=0.0))] * 3
    assert sample(logits, rows) == [0, 9, 5]


def test_tokens_are_counted_as_they_come() -> None:
    """A prompt token counts once, an answer token each time, and the arrays grow as needed."""
    prompt, answer = [3, 3, 8], [(5 * at) % 37 for at in range(300)]
    seen = SeenTokens(prompt)
    for token in answer:
        seen.add(token)
    counted = dict(zip(seen.ids_E.tolist(), seen.counts_E.tolist(), strict=True))
    assert counted == {token: answer.count(token) for token in {*prompt, *answer}}
    logits = torch.randn(1, VOCABULARY)
    params = SamplingParams(frequency_penalty=0.25)
    got = adjusted(logits, [SamplingRow(params, 300, frozenset(), seen)])
    counts = torch.bincount(torch.tensor(answer), minlength=VOCABULARY)
    assert torch.equal(got, logits - 0.25 * counts)
