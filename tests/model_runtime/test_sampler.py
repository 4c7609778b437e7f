"""Tokens are drawn as transformers' warpers say, and a seed decides them in any batch."""

import math
from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from model_runtime.request import SamplingParams
from model_runtime.sampler import MAX_LOGPROBS, logprobs, sample, uniform

VOCABULARY = 40


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after transformers' own processors."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_k": 100},
        {"top_p": 0.6},
        {"top_p": 0.05},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.8},
    ],
)
def test_frequencies_match_the_reference(options: dict[str, Any]) -> None:
    """chi-square over 20,000 draws, and nothing outside the reference's support"""
    logits = torch.randn(VOCABULARY) * 2
    params = SamplingParams(**options)
    expected = reference(logits, params)
    num_draws, block = 20_000, 2000
    counts = torch.zeros(VOCABULARY)
    for start in range(0, num_draws, block):
        steps = list(range(start, start + block))
        for token in sample(logits.expand(block, -1), [params] * block, steps):
            counts[token] += 1
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = ((counts - num_draws * expected) ** 2 / (num_draws * expected))[kept].sum()
    freedom = int(kept.sum()) - 1
    assert float(statistic) < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_a_seed_decides_in_any_batch() -> None:
    """alone, or between others with other parameters"""
    logits = torch.randn(6, VOCABULARY)
    params = [
        SamplingParams(seed=seed, temperature=0.3 * seed, top_k=seed, top_p=1 - seed / 10)
        for seed in range(6)
    ]
    together = sample(logits, params, [3] * 6)
    alone = [sample(logits[row : row + 1], [params[row]], [3])[0] for row in range(6)]
    assert together == alone


def test_temperature_zero_is_the_most_likely_token() -> None:
    """whatever the seed"""
    logits = torch.randn(5, VOCABULARY)
    params = [SamplingParams(temperature=0.0, seed=seed) for seed in range(5)]
    assert sample(logits, params, range(5)) == logits.argmax(-1).tolist()


def test_random_numbers_are_uniform_and_differ_by_seed_and_step() -> None:
    """in [0, 1)"""
    drawn = [uniform(seed, step) for seed in range(50) for step in range(50)]
    assert len(set(drawn)) == len(drawn)
    assert 0 <= min(drawn) < 0.01
    assert 0.99 < max(drawn) < 1
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.02)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """whatever the temperature; the alternatives from the likeliest down"""
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
