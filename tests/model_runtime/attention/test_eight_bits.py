"""A cache of eight bits with fixed scales: float64 reads what the codes stand for."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.cpu_backend import EightBitCpuAttention
from ropewalk.model_runtime.attention.eight_bits import Scales, scales_of
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.kv_disk.identity import arithmetic_facts
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import KVShape
from ropewalk.model_runtime.runner.backends import new_store
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.oracles.attention_cases import cases, relative_error
from tests.oracles.eight_bit_reads import in_codes
from tests.oracles.range_cases import CPU, METHODS, PlacedReads, largest_error

FIXED8 = {"kv_cache_dtype": "fixed8"}
PROMPT = [(at * at + 3 * at) % VOCAB_SIZE for at in range(90)]
_EXACT = {name: case for name, case in cases().items() if case.dtype == torch.float32}


def rounded(scale: Tensor, _module: Any, _inputs: Any, out: Tensor) -> Tensor:
    """What codes hold of a projection."""
    return (out.float() / scale).round().clamp(-127, 127).double() * scale.double()


BACKENDS = [EightBitCpuAttention, TorchAttention]


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_equal_float64_over_what_codes_stand_for(backend: Any, name: str) -> None:
    """No query and no probability is rounded."""
    laid, read = in_codes(replace(_EXACT[name], row_keys=backend.row_keys))
    exact = laid.exact
    expected = laid.expected()
    assert relative_error(backend(laid.batch).read(read), expected) < 1e-5
    assert relative_error(exact, expected) > 1e-3


@pytest.mark.parametrize("name", ["rerope", "sinks"])
def test_ranges_equal_float64_over_what_codes_stand_for(name: str) -> None:
    """Position methods have a kernel of their own."""
    laid = PlacedReads(METHODS[name][0])
    keys, values = laid.keys.transpose(2, 3).transpose(1, 2), laid.values.transpose(1, 2)
    numbers = keys.flatten(0, 1), values.flatten(0, 1)
    scales = scales_of(*numbers, laid.tables.num_pairs)
    codes = scales.codes(*numbers)
    key_codes = codes[0].view(keys.shape).permute(0, 2, 3, 1).contiguous()
    value_codes = codes[1].view(values.shape).transpose(1, 2).contiguous()
    read = replace(
        laid.read(),
        keys_NKDO=key_codes,
        values_NKOV=value_codes,
        scales=scales,
    )
    laid.keys = read.keys_NKDO.float() * scales.key_KD[:, :, None]
    laid.values = read.values_NKOV.float() * scales.value_KV[:, None]
    got = EightBitCpuAttention(laid.batch).read(read)
    assert largest_error(got, laid.exact(METHODS[name][1])) < 1e-4


@pytest.mark.parametrize("backend", [EightBitCpuAttention, TorchAttention])
def test_a_write_rounds_to_the_nearest_code(backend: Any) -> None:
    """Numbers beyond the largest saturate, and NaN is 0; each lands in its own place."""
    numbers = torch.randn(33, 2, 20) * torch.logspace(-6, 4, 33)[:, None, None]
    numbers[3, 1, 5], numbers[4, 0, 19], numbers[5, 0, 0] = torch.nan, torch.inf, -torch.inf
    key_TKD, value_TKV = numbers.split([12, 8], -1)
    powers = torch.ldexp(torch.ones(2, 20), torch.arange(40).view(2, 20) % 7 - 3)
    scales = Scales(*powers.split([12, 8], -1))
    span = Span([0] * 33, 5, [3, 1, 2], 0, range(0))
    layout = CacheLayout({0: KVShape(2, 12, 8)}, torch.float32, 16, "fixed8")
    store = new_store(layout, 4, CPU, scales={0: scales})
    assert (store.own_backend(), store.dtype) == (EightBitCpuAttention, torch.int8)
    keys_NKDO, values_NKOV = store.pages(0)
    batch = build_batch([span], 16, CPU)
    backend(batch).write(keys_NKDO, values_NKOV, key_TKD, value_TKV, scales)
    at_T = torch.arange(5, 38)
    page_T = torch.tensor(span.pages)[at_T // 16]
    got = torch.cat(
        (keys_NKDO[page_T, :, :, at_T % 16].float(), values_NKOV[page_T, :, at_T % 16].float()), -1
    )
    expected = (numbers / powers).double().round().clamp(-127, 127).nan_to_num(0.0)
    assert torch.equal(got.double(), expected)
    assert float(got.abs().max()) == 127


def test_scales_reach_deviations_of_later_tokens_and_the_largest_number() -> None:
    """Pairs share the larger one. A dimension of zeros has a scale, too."""
    keys, values = torch.randn(400, 2, 12) + 50 * torch.randn(2, 12), torch.randn(400, 2, 6) * 1e-3
    values[:, 1, 2], values[7, 0, 3] = 0.0, 2.0
    keys[0] = keys.mean(0) + 5.0  # far from the others, but within the reach
    scales = scales_of(keys, values, 4, firsts=(0,))
    assert torch.equal(scales.key_KD[:, :4], scales.key_KD[:, 4:8])
    later = keys[1:].double()
    reach_KD = (later.mean(0).abs() + 6.5 * later.std(0)) / 127
    pair_KP = torch.maximum(reach_KD[:, :4], reach_KD[:, 4:8])
    expected_KD = torch.cat((pair_KP, pair_KP, reach_KD[:, 8:]), 1)
    assert torch.allclose(scales.key_KD.double(), expected_KD)
    codes = scales.codes(keys, values)
    assert 20 < int(codes[1][:, 0, 0].abs().max()) < 127
    assert int(codes[1][7, 0, 3]) == 127
    assert bool(codes[1][:, 1, 2].eq(0).all())
    assert bool((scales.value_KV > 0).all())


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_logprobs_equal_transformers_over_what_codes_stand_for(
    engines: EngineFactory, name: str
) -> None:
    """Hooks round what the untouched model projects, in float64; prompts and decodes read it."""
    reference = tiny_model(name, max_position_embeddings=256).double().eval()
    plain = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    checkpoint = checkpoint_of(tiny_model(name, max_position_embeddings=256))
    for index, layer in enumerate(reference.model.layers):
        scales = checkpoint.scales[index]
        layer.self_attn.k_proj.register_forward_hook(partial(rounded, scales.key_KD.flatten()))
        layer.self_attn.v_proj.register_forward_hook(partial(rounded, scales.value_KV.flatten()))
    wanted = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    engine = engines.over(checkpoint, **FIXED8, max_num_batched_tokens=40)
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=1, prompt_logprobs=1)
    got = torch.tensor(answer(engine, asked)[0].prompt_logprob_values())
    next_T = torch.tensor(PROMPT[1:])[:, None]
    error, distance = (
        (got - each[:-1].gather(1, next_T)[:, 0]).abs().median() for each in (wanted, plain)
    )
    assert error < distance / 10


def test_the_reference_backend_answers_as_the_kernels_do(
    engines: EngineFactory, llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor where no kernel works."""
    asked = request(deployment_of(llama_checkpoint), PROMPT, max_tokens=1, prompt_logprobs=1)
    expected = answer(engines.over(llama_checkpoint, **FIXED8), asked)[0].prompt_logprob_values()
    monkeypatch.setattr("ropewalk.model_runtime.runner.backends.cpu_fault", lambda: "no numba")
    engine = engines.over(llama_checkpoint, **FIXED8)
    assert engine._core._runner._backend is TorchAttention
    got = answer(engine, asked)[0].prompt_logprob_values()
    # A number half-way between two codes may be rounded to the other one.
    errors = torch.tensor(got).sub(torch.tensor(expected)).abs()
    assert errors.median() < 1e-3
    assert errors.max() < 1e-1


def test_scales_are_part_of_the_identity_of_pages(llama_checkpoint: Checkpoint) -> None:
    """And only of pages that have them."""
    config = EngineConfig(kv_cache_tokens=256, max_model_len=128)
    for kind, is_same in (("fixed8", False), ("auto", True)):
        with_kind = replace(config, kv_cache_dtype=kind)
        facts = arithmetic_facts(llama_checkpoint, with_kind)
        scales = {**llama_checkpoint.scales}
        scales[3] = Scales(scales[3].key_KD * 2, scales[3].value_KV)
        other = arithmetic_facts(replace(llama_checkpoint, scales=scales), with_kind)
        assert (facts == other) is is_same
