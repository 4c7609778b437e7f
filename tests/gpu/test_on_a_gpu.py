"""Properties that only a GPU can show: `make gpu-check`.

The kernels' own cases are in tests/model_runtime/attention/, in test_triton_backend.py and
test_triton_prefill.py. They run on the GPU if there is one.
"""

import gc
import random
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from triton.runtime.jit import JITFunction

from benchmarks.gpu.attention import angle_errors
from benchmarks.gpu.inputs import LLAMA_3_8B
from ropewalk.model_runtime.attention.batch import build_batch, single_rows
from ropewalk.model_runtime.attention.prompt_groups import Mask
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.memory.memory_profile import CudaMeter
from ropewalk.model_runtime.gpu import flash as triton_flash
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.request import FinishReason, SamplingParams
from ropewalk.model_runtime.runner.backends import backend_for
from ropewalk.model_runtime.runner.cuda_graphs import recorded_sizes
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.prompt_graphs import LEAST_TOKENS, prompt_sizes
from ropewalk.model_runtime.runner.sampler import SamplingRow, sample_rows
from tests.compilations import CONFIG as COMPILED_FOR
from tests.compilations import PROFILES, random_steps
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, num_same, request
from tests.oracles.attention_cases import Case, Laid, relative_error
from tests.oracles.exact_flash import exact_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
CUDA = torch.device("cuda")
CAUSAL, NO_MASK = Mask(-1, 0), Mask(-1, -1)
LLAMA_HEADS = {"heads": (32, 8), "dims": (128, 128), "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "spans",
    [((32_768, 1), (5000, 1), (17, 1)), ((8192, 512), (4100, 1), (300, 300)), ((70_000, 1),)],
)
def test_long_contexts_equal_float64(spans: tuple[tuple[int, int], ...]) -> None:
    """Heads are Llama 3 8B's, with many splits and prompt chunks beside decodes."""
    laid = Laid(Case(spans=spans, **LLAMA_HEADS), CUDA)
    got_THV = TritonAttention(laid.batch).read(laid.read)
    assert relative_error(got_THV, laid.expected()) < 1e-2


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (64, 8)])
def test_rows_behind_long_contexts_equal_float64(
    heads: tuple[int, int], window: int | None, *, has_sinks: bool
) -> None:
    """Four, sixteen and two tokens of a sequence read its keys together, beside decodes."""
    spans = ((8192, 4), (5000, 1), (20_000, 8), (60, 60), (4097, 3))
    layer = {**LLAMA_HEADS, "heads": heads, "window": window, "has_sinks": has_sinks}
    laid = Laid(Case(spans=spans, page_size=64, **layer), CUDA)
    batch = build_batch(single_rows(laid.spans), 64, CUDA)
    assert relative_error(TritonAttention(batch).read(laid.read), laid.expected()) < 1e-2
    (work,) = batch.work_lists.values()
    assert int(work.entries_EF[:, 4].max()) == 16 * heads[1] // heads[0]


# Whole prompts, chunks behind a context, and single tokens between them.
PROMPTS = ((700, 700), (4100, 1), (3000, 512), (2049, 65), (64, 2), (130, 128))


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 200, 1024])
def test_flash_attention_equals_float64(window: int | None, dim: int, *, has_sinks: bool) -> None:
    """Torch's flash attention is called for several prompts at once, in a layer that it serves."""
    case = Case(
        spans=PROMPTS,
        heads=(8, 2),
        dims=(dim, dim),
        dtype=torch.bfloat16,
        window=window,
        has_sinks=has_sinks,
    )
    laid = Laid(case, CUDA)
    assert triton_flash.serves(laid.read)
    got_THV = TritonAttention(laid.batch).read(laid.read)
    assert relative_error(got_THV, laid.expected()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        *(
            ((5, 200, 64), mask)
            for mask in (CAUSAL, Mask(0, 0), Mask(49, 0), NO_MASK, Mask(300, -1))
        ),
        # Rows alone are causal in a step (placed_prompts.py).
        *(((2, 1, 1), CAUSAL), ((2, 1, 1), NO_MASK), ((1, 1, 1), CAUSAL)),
    ],
)
def test_flash_attention_aligns_masks_to_the_lower_right(
    tokens: tuple[int, ...], mask: Mask, dtype: torch.dtype
) -> None:
    """The output and the log-sum-exp are those of a mask that is written out in float64."""
    keys = (5, 900, 65)
    query_THD = torch.randn(sum(tokens), 6, 64, device=CUDA, dtype=dtype)
    key_CKD = torch.randn(sum(keys), 2, 64, device=CUDA, dtype=dtype)
    value_CKD = torch.randn_like(key_CKD)
    cu_tokens_G1, cu_keys_G1 = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=CUDA)
        for each in (tokens, keys)
    )
    offsets = (cu_tokens_G1, cu_keys_G1, max(tokens), max(keys))
    got = triton_flash.flash(query_THD, key_CKD, value_CKD, *offsets, 0.125, mask)
    expected = exact_flash(query_THD, key_CKD, value_CKD, *offsets, 0.125, mask)
    assert relative_error(got[0], expected[0].double().cpu()) < 1e-2
    assert relative_error(got[1], expected[1].double().cpu()) < 1e-3


def test_pages_behind_the_reach_of_32_bits_are_read() -> None:
    """The cache has more than 2**32 numbers."""
    case = Case(heads=(8, 8), dims=(128, 128), spans=((100, 1), (90, 20)), dtype=torch.bfloat16)
    laid = Laid(case, CUDA)
    page_len = laid.read.keys_NKDO[0].numel()
    num_pages = 2**32 // page_len + 100
    keys = torch.zeros(num_pages, 8, 16, 128, dtype=case.dtype, device=CUDA).transpose(2, 3)
    values = torch.zeros(num_pages, 8, 16, 128, dtype=case.dtype, device=CUDA)
    used = len(laid.read.keys_NKDO)
    keys[-used:] = laid.read.keys_NKDO
    values[-used:] = laid.read.values_NKOV
    laid.batch.page_table_SN.add_(num_pages - used)
    read = replace(laid.read, keys_NKDO=keys, values_NKOV=values)
    got_THV = TritonAttention(laid.batch).read(read)
    assert relative_error(got_THV, laid.expected()) < 1e-2


@pytest.mark.parametrize("window", [None, 60_000])
def test_a_prompt_needs_no_mask_in_memory(window: int | None) -> None:
    """The memory is less than a bit for each pair of query and key, with and without a window."""
    case = Case(
        heads=(4, 1), dims=(64, 64), spans=((65_536, 8192),), dtype=torch.bfloat16, window=window
    )
    laid = Laid(case, CUDA)
    attention = TritonAttention(laid.batch)
    attention.read(laid.read)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.read(laid.read)
    assert torch.cuda.max_memory_allocated() - before < 65_536 * 8192 // 8 + 60_000_000


def test_angles_are_right_at_a_million() -> None:
    """The reference is float64 positions over the same float32 frequencies."""
    told = angle_errors(LLAMA_3_8B, CUDA)
    assert told["position"] == 2**20
    assert told["cosine_error"] < 1e-5
    assert told["transformers_cosine_error"] > 1e-3  # so the comparison can tell


def test_the_embedded_model_passes_its_self_check(on_gpu: Checkpoint) -> None:
    """The backend is Triton's kernels, not the reference."""
    assert backend_for(on_gpu.device) is TritonAttention
    assert on_gpu.report.difference <= on_gpu.report.threshold


def test_the_forward_is_a_list_of_launches(on_gpu: Checkpoint) -> None:
    """Its weights are those of the modules."""
    assert type(on_gpu.model.forward).__name__ == "FlatForward"
    attention = on_gpu.model.get_submodule("model.layers.0.self_attn")
    weights = [attention.get_parameter(f"{name}_proj.weight") for name in "qkv"]
    assert len({each.untyped_storage().data_ptr() for each in weights}) == 1


def test_the_engine_serves_as_on_a_cpu(on_gpu: Checkpoint, engines: EngineFactory) -> None:
    """Prompts of several lengths run together, past the native length, random and greedy."""
    answers: list[list[Result]] = []
    for checkpoint in (on_gpu, load_checkpoint(EMBEDDED_MODEL, dtype="float32", device="cpu")):
        deployment = deployment_of(checkpoint)
        requests = [
            request(deployment, [(7 * at + length) % 900 + 5 for at in range(length)], **sampling)
            for length in (5, 100, 700)
            for sampling in (
                {"max_tokens": 12, "ignore_eos": True, "prompt_logprobs": 1},
                {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8, "top_p": 0.9, "seed": 1},
            )
        ]
        answers.append(answer(engines.over(checkpoint), *requests))
    for got, expected in zip(*answers, strict=True):
        assert len(got.token_ids) == 12
        ours = torch.tensor(got.prompt_logprob_values())
        theirs = torch.tensor(expected.prompt_logprob_values())
        # bfloat16 weights answer a little otherwise; a wrong read answers altogether otherwise.
        most = 1e-3 if on_gpu.dtype == torch.float32 else 0.1
        assert len(ours) == len(theirs)
        assert not len(ours) or float((ours - theirs).abs().mean()) < most


@pytest.mark.alone  # other processes' memory on the device would count
def test_a_cache_sized_by_a_step_leaves_room_for_any(
    on_gpu: Checkpoint, engines: EngineFactory
) -> None:
    """Full prompts with all logprobs and sampled answers stay within the share."""
    for package in ("pydantic_settings", "prometheus_client"):
        pytest.importorskip(package, reason="settings are the server's")
    from ropewalk.server.settings.load import load_settings
    from ropewalk.server.startup.planning.model_facts import facts_of
    from ropewalk.server.startup.planning.serving_plan import plan_serving

    meter = CudaMeter(on_gpu.device)
    gc.collect()  # an earlier case's engine, whose memory the plan would find free
    meter.reset()
    before = meter.read()
    share = (before.total - before.free + 2 * 2**30) / before.total
    settings = load_settings(
        {
            "gpu_memory_utilization": f"{share:.4f}",
            "max_num_seqs": "512",
            "max_num_batched_tokens": "8192",
            "max_queued_requests": "2000",
        }
    )
    plan = plan_serving(settings, facts_of(on_gpu, settings))
    assert plan.memory is not None
    # The memory of the step is given back; the part that libraries keep is less than half.
    assert meter.read().allocated < plan.memory.weight_bytes + plan.memory.step_bytes // 2
    # The share is what bounds this cache, not the contexts: so it is full.
    assert 2**29 < plan.cache_bytes < 512 * 2048 * plan.layout.token_bytes
    meter.reset()
    config = {each.name: getattr(plan.config, each.name) for each in fields(plan.config)}
    engine = engines.over(on_gpu, **config)
    (deployment,) = plan.deployments
    ids = [(7 * at) % 900 + 5 for at in range(plan.config.max_model_len - 4)]
    sampling = {"max_tokens": 4, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9}
    num_failures = torch.cuda.memory_stats(on_gpu.device)["num_ooms"]
    results = answer(
        engine,
        *(
            request(deployment, ids, prompt_logprobs=20, logprobs=20, seed=seed, **sampling)
            for seed in range(4)
        ),
        *(request(deployment, ids[seed:20], seed=seed, **sampling) for seed in range(16)),
        *(request(deployment, ids[seed % 50 : 60], seed=seed, **sampling) for seed in range(1000)),
    )
    assert all(result.finish_reason is FinishReason.LENGTH for result in results)
    assert [len(result.prompt_logprobs) for result in results[:4]] == [len(ids)] * 4
    assert torch.cuda.memory_stats(on_gpu.device)["num_ooms"] == num_failures
    after = meter.read()
    assert plan.cache_bytes < after.peak
    assert after.outside + after.peak <= settings.gpu_memory_utilization * after.total


@pytest.mark.parametrize("num_requests", [1, 3, 7])
def test_recorded_steps_answer_as_others(
    on_gpu: Checkpoint, engines: EngineFactory, num_requests: int
) -> None:
    """The contexts are on several tiers, and batches are padded to a recorded size."""
    deployment = deployment_of(on_gpu)
    requests = [
        request(
            deployment,
            [(11 * at + index) % 900 + 5 for at in range(20 + 150 * index)],
            max_tokens=40,
            ignore_eos=True,
            logprobs=2,
        )
        for index in range(num_requests)
    ]
    recorded, queued = (
        answer(engines.over(on_gpu, enforce_eager=enforce_eager), *requests)
        for enforce_eager in (False, True)
    )
    for got, expected in zip(recorded, queued, strict=True):
        # Sums in other splits round otherwise, and from where a near tie falls the other way on
        # the answers are different texts.
        same = num_same(got.token_ids, expected.token_ids)
        assert same >= 1
        ours, theirs = (
            torch.tensor([entry.logprob for entry in each.logprobs[:same]])
            for each in (got, expected)
        )
        assert float((ours - theirs).abs().max()) < (1e-3 if on_gpu.dtype == torch.float32 else 0.2)


def test_decodes_are_recorded(on_gpu: Checkpoint) -> None:
    """Every size of decodes and short prompts is recorded at start; a warning does not end it."""
    config = EngineConfig(kv_cache_tokens=4096, max_model_len=2048, max_num_seqs=3)
    profiles = [tier.profile for tier in deployment_of(on_gpu).own_tiers]
    runner = build_engine(on_gpu, config, profiles=profiles)._core._runner
    assert isinstance(runner, ModelRunner)
    assert runner._graphs is not None
    assert sorted(runner._graphs._recorded) == recorded_sizes(3, LEAST_TOKENS)
    assert runner._prompt_graphs is not None
    assert sorted(runner._prompt_graphs._captured) == prompt_sizes(config.max_num_batched_tokens)


def test_no_request_waits_for_a_compilation(
    on_gpu: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random mixed steps find every kernel compiled by the warm-up."""
    runner = build_engine(on_gpu, COMPILED_FOR, profiles=PROFILES)._core._runner
    compiled = []
    compile_kernel = JITFunction._do_compile

    def noted(self: JITFunction, *args: Any, **options: Any) -> Any:
        compiled.append(self.__name__)
        return compile_kernel(self, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    cuts = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5}]
    for number, spans in enumerate(random_steps(random.Random(0), 100)):
        logits_RV = runner.run(spans)
        params = SamplingParams(temperature=1.0, **cuts[number % 4])
        places = range(min(len(logits_RV), 1 + number // 4))
        sample_rows(logits_RV, places, [SamplingRow(params, 0, frozenset())] * len(places))
    torch.cuda.synchronize()
    assert compiled == []


def test_the_reference_reads_on_a_gpu_too() -> None:
    """The reference serves on machines without triton."""
    laid = Laid(Case(), CUDA)
    assert relative_error(TorchAttention(laid.batch).read(laid.read), laid.expected()) < 1e-5
