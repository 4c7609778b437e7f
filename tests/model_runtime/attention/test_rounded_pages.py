"""A cache in bfloat16 under a model in float32: torch rounds for comparison, float64 reads."""

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.cpu_backend import RoundedCpuAttention
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import KVShape
from ropewalk.model_runtime.runner.backends import new_store
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from tests.checkpoints.tiny_models import VOCAB_SIZE, in_dtype, tiny_model
from tests.doubles.engines import (
    EngineFactory,
    answer,
    checkpoint_of,
    deployment_of,
    groups_of,
    request,
    tiny_checkpoint,
)
from tests.oracles.attention_cases import Laid, cases, relative_error
from tests.oracles.range_cases import CPU, METHODS, PlacedReads, largest_error

ROUNDED = {"kv_cache_dtype": "bfloat16"}
PROMPT = [(at * at + 3 * at) % VOCAB_SIZE for at in range(90)]


def rounded(numbers: Tensor) -> Tensor:
    """What bfloat16 holds of numbers, in their own type."""
    return numbers.to(torch.bfloat16).to(numbers.dtype)


def patterns() -> Tensor:
    """Float32 numbers of all kinds: ties both ways, subnormals, infinities, NaN, random bits."""
    ends = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    heads = torch.tensor([0x0000, 0x8000, 0x0080, 0x3F80, 0x3F81, 0xBF81, 0x7F7E, 0x7F80, 0xFFC1])
    bits = (heads[:, None] * 65536 + ends).flatten()
    more = torch.randint(0, 2**32, (2 * 20 * 33 - len(bits),))
    both = torch.cat((bits, more))
    return (both - (both >= 2**31) * 2**32).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("backend", [RoundedCpuAttention, TorchAttention])
def test_a_write_rounds_as_torch_does(backend: Any) -> None:
    """To nearest even, for every kind of number; each lands in its own place."""
    key_TKD, value_TKV = patterns().view(33, 2, 20).split([12, 8], -1)
    span = Span([0] * 33, 5, [3, 1, 2], 0, range(0))
    layout = CacheLayout({0: KVShape(2, 12, 8)}, torch.bfloat16, 16)
    store = KVCache(layout, 4, CPU, row_keys=backend.row_keys)
    keys_NKDO, values_NKOV = store.pages(0)
    backend(build_batch([span], 16, CPU)).write(keys_NKDO, values_NKOV, key_TKD, value_TKV)
    at_T = torch.arange(5, 38)
    page_T = torch.tensor(span.pages)[at_T // 16]
    for got, wanted in (
        (keys_NKDO[page_T, :, :, at_T % 16], key_TKD),
        (values_NKOV[page_T, :, at_T % 16], value_TKV),
    ):
        expected = wanted.to(torch.bfloat16)
        assert torch.equal(got.isnan(), expected.isnan())
        is_number = ~expected.isnan()
        same = got.view(torch.int16) == expected.view(torch.int16)
        assert bool(same[is_number].all())


@pytest.mark.parametrize("name", ["plain", "all", "odd head", "page of 24", "long window"])
@pytest.mark.parametrize("backend", [RoundedCpuAttention, TorchAttention])
def test_reads_equal_float64_over_rounded_keys(backend: Any, name: str) -> None:
    """The error is that of float32, so queries and probabilities are not rounded."""
    laid = Laid(replace(cases()[name], row_keys=backend.row_keys), CPU)
    keys_NKDO, values_NKOV = laid.read.keys_NKDO, laid.read.values_NKOV
    read = replace(
        laid.read,
        keys_NKDO=keys_NKDO.to(torch.bfloat16),
        values_NKOV=values_NKOV.to(torch.bfloat16),
    )
    exact = laid.expected()
    laid.keys, laid.values = ([rounded(each) for each in held] for held in (laid.keys, laid.values))
    expected = laid.expected()
    assert relative_error(backend(laid.batch).read(read), expected) < 1e-5
    assert relative_error(exact, expected) > 1e-4


@pytest.mark.parametrize("name", ["rerope", "self_extend, group of pages", "sinks", "dual_chunk"])
def test_ranges_equal_float64_over_rounded_keys(name: str) -> None:
    """Position methods have a kernel of their own."""
    laid = PlacedReads(METHODS[name][0])
    laid.keys, laid.values = rounded(laid.keys), rounded(laid.values)
    whole = laid.read()
    read = replace(
        whole,
        keys_NKDO=whole.keys_NKDO.to(torch.bfloat16),
        values_NKOV=whole.values_NKOV.to(torch.bfloat16),
    )
    got = RoundedCpuAttention(laid.batch).read(read)
    assert largest_error(got, laid.exact(METHODS[name][1])) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logprobs_equal_transformers_over_rounded_keys(engines: EngineFactory, name: str) -> None:
    """Hooks round what the untouched model projects, in float64; prompts and decodes read it."""
    reference = tiny_model(name, max_position_embeddings=256).double().eval()
    plain = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for layer in reference.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.register_forward_hook(lambda _module, _inputs, out: rounded(out.float()).double())
    wanted = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    checkpoint = checkpoint_of(tiny_model(name, max_position_embeddings=256))
    engine = engines.over(checkpoint, **ROUNDED, max_num_batched_tokens=40)
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
    """Of a model in float32, on a processor where no kernel works."""
    asked = request(deployment_of(llama_checkpoint), PROMPT, max_tokens=1, prompt_logprobs=1)
    compiled = engines.over(llama_checkpoint, **ROUNDED)
    expected = answer(compiled, asked)[0].prompt_logprob_values()
    monkeypatch.setattr("ropewalk.model_runtime.runner.backends.cpu_fault", lambda: "no numba")
    store = new_store(llama_checkpoint.cache_layout(16, "bfloat16"), 16, CPU)
    assert store.own_backend() is None
    assert store.dtype == torch.bfloat16
    engine = engines.over(llama_checkpoint, **ROUNDED)
    assert engine._core._runner._backend is TorchAttention
    got = answer(engine, asked)[0].prompt_logprob_values()
    # A number half-way between two of bfloat16 may be rounded to the other one.
    errors = torch.tensor(got).sub(torch.tensor(expected)).abs()
    assert errors.median() < 1e-4
    assert errors.max() < 1e-2


def test_a_cache_takes_half_the_memory(engines: EngineFactory, embedded: Checkpoint) -> None:
    """To the byte, of what torch holds."""
    stores = [engines.over(embedded, **each)._core._runner.store for each in ({}, ROUNDED)]
    exact, few = (each.num_bytes for each in stores)
    assert 2 * few == exact
    assert few == sum(each.nbytes for each in chain(stores[1].page_memory()))


def test_a_model_in_bfloat16_has_the_cache_of_auto(engines: EngineFactory) -> None:
    """The same kernels and bits."""
    checkpoint = checkpoint_of(in_dtype(tiny_model("llama"), torch.bfloat16))
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=20, logprobs=2)
    both = [engines.over(checkpoint, **each) for each in ({}, ROUNDED)]
    assert answer(both[0], asked) == answer(both[1], asked)
    exact, few = (each._core._runner for each in both)
    assert exact._backend is few._backend
    assert exact.store.num_bytes == few.store.num_bytes


def test_what_has_no_such_cache_is_refused(embedded: Checkpoint) -> None:
    """A GPU, numbers of float16, and several processes; each sentence names the setting."""
    config = EngineConfig(kv_cache_tokens=256, max_model_len=128, **ROUNDED)
    with pytest.raises(ModelError, match="bfloat16 needs the model on a CPU, and it is on cuda"):
        new_store(embedded.cache_layout(64, "bfloat16"), 4, torch.device("cuda"))
    with pytest.raises(ModelError, match="bfloat16 needs the dtype float32 or bfloat16, and the"):
        CacheLayout(embedded.plans, torch.float16, 64, "bfloat16").check()
    with pytest.raises(ModelError, match="kv_cache_dtype bfloat16 is for a model in one process"):
        build_engine(embedded, config, make=partial(ModelRunner, is_one_of_ranks=True))


def test_layers_that_hold_their_window_round_too(engines: EngineFactory) -> None:
    """Pages of groups of layers have the same answers as pages of all layers."""
    checkpoint = tiny_checkpoint("gemma3")
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=20, logprobs=2)
    limits = {**ROUNDED, "max_model_len": 256, "max_num_batched_tokens": 33}
    held = engines.over(checkpoint, **limits, page_groups=groups_of(checkpoint))
    expected = answer(engines.over(checkpoint, **limits), asked)
    assert answer(held, asked) == expected
    assert held._core._runner.store.dtype == torch.bfloat16
    assert answer(engines.over(checkpoint, **{**limits, "kv_cache_dtype": "auto"}), asked) != (
        expected
    )
