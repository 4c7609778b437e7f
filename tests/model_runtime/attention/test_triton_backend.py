"""The GPU's kernels against float64: on the device, or by Triton's interpreter without one.

Memory from `torch.empty` is poisoned with NaN, and so is every place of the cache without a token
of a sequence.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention import work_list
from ropewalk.model_runtime.attention.batch import build_batch, single_rows
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.loading.checkpoint import prepare_model
from tests.checkpoints.tiny_models import tiny_model
from tests.compilations import ARCHITECTURES
from tests.doubles.tokens import byte_tokenizer
from tests.gpu_targets import CARDS
from tests.oracles.attention_cases import Case, Laid, cases, relative_error, tolerance
from tests.oracles.eight_bit_reads import in_codes

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.launch import jit
from tests.oracles.triton_attention import load_as_on_a_gpu

ROOT = Path(__file__).resolve().parents[3]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REGISTERS = 65_536  # of a processor, since compute capability 8.0
# Shared memory of a program on every GPU since compute capability 8.0 (that of 8.6).
MOST_SHARED = 99 * 1024


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Torch's deterministic mode fills unwritten memory with NaN."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(mode=False)


def check(case: Case) -> None:
    """Check that the read of a case is as near to float64 as its dtype allows."""
    laid = Laid(case, DEVICE)
    got_THV = TritonAttention(laid.batch).read(laid.read)
    assert relative_error(got_THV, laid.expected()) < tolerance(case, DEVICE)


def interpreted_cases() -> Iterator[tuple[str, Case]]:
    """The cases that reach every branch of the kernels, mostly with fewer tokens.

    The interpreter takes seconds for the others, and a GPU reads all of them.
    """
    for name in (
        *("all", "no rotation", "odd head, bf16", "wide head, bf16", "one head for all"),
        *("page of 4", "page of 24", "page of 256", "keys by dimension", "tails", "long sinks"),
        *("tiny window", "sinks, f16"),
    ):
        case = cases()[name]
        is_long = case.spans == Case().spans and name != "all"
        yield name, replace(case, spans=((1, 1), (200, 1), (70, 20))) if is_long else case


READS = cases() if DEVICE.type == "cuda" else dict(interpreted_cases())


@pytest.mark.parametrize("name", READS)
def test_a_read_equals_float64(name: str) -> None:
    """A read agrees with float64 for mixed profiles, lengths and numbers of queries."""
    check(READS[name])


# Contexts and tokens of sequences whose tokens are rows. Some begin or end a page or a tile, and
# there are more of them than are read together.
ROWS = ((1, 1), (66, 5), (9, 9), (200, 3), (130, 1), (80, 20))
READ_AS_ROWS = (
    *("plain", "all", "no rotation", "odd head, bf16", "one head for all", "page of 24"),
    *("tiny window", "sinks, f16", "keys by dimension"),
)


@pytest.mark.parametrize("name", cases() if DEVICE.type == "cuda" else READ_AS_ROWS)
def test_rows_of_one_sequence_equal_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token sees the keys up to its own, in pieces that only others of its sequence see, too."""
    monkeypatch.setattr(work_list, "_LEAST_TILES", 1)
    laid = Laid(replace(cases()[name], spans=ROWS), DEVICE)
    check_rows(laid, laid.read, tolerance(laid.case, DEVICE))


def check_rows(laid: Laid, read: LayerRead, most: float) -> None:
    """Check a read whose tokens are rows, and that keys are loaded once for several of them."""
    batch = build_batch(single_rows(laid.spans), laid.case.page_size, DEVICE)
    assert relative_error(TritonAttention(batch).read(read), laid.expected()) < most
    group = laid.case.heads[0] // laid.case.heads[1]
    (work,) = batch.work_lists.values()
    entries = work.entries_EF.cpu()
    num_loaded = int((entries[:, 2] - entries[:, 1]).sum())
    window = laid.case.window or 10_000
    together = 16 // group or 1
    expected = 0
    for context, num_tokens in laid.case.spans:
        for first in range(context - num_tokens, context, together):
            end = min(first + together, context)
            expected += end - max(0, first + 1 - window)
    assert num_loaded == expected


@pytest.mark.parametrize("seed", range(12 if DEVICE.type == "cuda" else 6))
def test_features_do_not_disturb_each_other(seed: int) -> None:
    """Each seed draws a random combination of all features."""
    draw = random.Random(seed)
    group, key_heads = draw.choice((1, 3, 4)), draw.choice((1, 2))
    spans = []
    for _ in range(draw.randint(1, 4)):
        queries = draw.choice((1, 1, 1, 2, 40))
        spans.append((queries + draw.randint(0, 300), queries))
    check(
        Case(
            spans=tuple(spans),
            heads=(group * key_heads, key_heads),
            dims=(draw.choice((16, 24, 64)), draw.choice((16, 40))),
            rotary_share=draw.choice((None, 0.25, 0.5, 1.0)),
            page_size=draw.choice((4, 16, 20, 64)),
            dtype=draw.choice((torch.float32, torch.bfloat16, torch.float16)),
            window=draw.choice((None, 1, 9, 100)),
            softcap=draw.choice((None, 2.0, 30.0)),
            has_sinks=draw.random() < 0.5,
            row_keys=draw.random() < 0.5,
        )
    )


@pytest.mark.parametrize(
    ("row_keys", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_tokens_are_written_to_their_places(dtype: torch.dtype, *, row_keys: bool) -> None:
    """Torch's backend is the reference, and the keys come as slices with strides."""
    case = Case(heads=(6, 3), dims=(24, 40), dtype=dtype, row_keys=row_keys)
    written = []
    laid = Laid(case, DEVICE)
    num_tokens = len(laid.read.query_THD)
    # As a model hands them over: a slice of one product's rows.
    rows = torch.randn(num_tokens, 3, 80).to(DEVICE, dtype)
    key_TKD, value_TKV = rows[..., :24], rows[..., 30:70]
    for backend in (TorchAttention, TritonAttention):
        pages = laid.read.keys_NKDO.clone().zero_(), laid.read.values_NKOV.clone().zero_()
        backend(laid.batch).write(*pages, key_TKD, value_TKV)
        written.append(pages)
    for reference, own in zip(*written, strict=True):
        assert torch.equal(reference, own)
        assert bool(own.any())


@pytest.mark.parametrize("name", ["plain", "all", "all, bf16"])
def test_a_read_of_codes_equals_float64_over_what_they_stand_for(name: str) -> None:
    """Codes are multiplied as float16, which rounds queries, rotated keys and probabilities."""
    laid, read = in_codes(cases()[name], DEVICE)
    expected = laid.expected()
    most = 1e-3 if laid.case.dtype == torch.float32 else tolerance(laid.case, DEVICE)
    assert relative_error(TritonAttention(laid.batch).read(read), expected) < most
    assert relative_error(laid.exact, expected) > 2 * most


def test_rows_of_one_sequence_share_codes() -> None:
    """Their queries are turned to the first one's position before they meet the codes."""
    laid, read = in_codes(replace(cases()["all"], spans=ROWS), DEVICE)
    check_rows(laid, read, 1e-3)


def test_codes_are_written_as_torch_rounds_them() -> None:
    """Numbers between, half-way and beyond codes, and NaN."""
    laid, read = in_codes(Case(heads=(6, 3), dims=(24, 40), dtype=torch.float32), DEVICE)
    numbers = torch.randn(len(read.query_THD), 3, 64) * 4
    numbers[::3] = (numbers[::3] * 16).round() / 32  # half-way between codes under some scales
    numbers[1::5] *= 1000
    numbers[7, 1, 5], numbers[8, 2, 60] = torch.nan, -torch.inf
    written = []
    for backend in (TorchAttention, TritonAttention):
        pages = torch.zeros_like(read.keys_NKDO), torch.zeros_like(read.values_NKOV)
        key_TKD, value_TKV = numbers.to(DEVICE).split([24, 40], -1)
        backend(laid.batch).write(*pages, key_TKD, value_TKV, read.scales)
        written.append(pages)
    for reference, own in zip(*written, strict=True):
        assert torch.equal(reference, own)
        assert bool(own.any())


@pytest.mark.parametrize("architecture", ["gpt_oss", "cohere2"])
def test_a_taken_over_model_answers_as_before(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The architectures have windows, sinks, interleaved pairs or layers without rotation."""
    if DEVICE.type == "cpu":
        load_as_on_a_gpu(monkeypatch)
    layers = ["sliding_attention", "full_attention"]
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    model = tiny_model(architecture, num_hidden_layers=2, layer_types=layers, **sizes).to(DEVICE)
    checkpoint = prepare_model(model, byte_tokenizer(), frozenset(), {})
    assert checkpoint.report.difference <= checkpoint.report.threshold


@pytest.mark.parametrize(
    ("page_size", "window", "has_sinks"), [(64, None, False), (128, 1100, True)]
)
def test_one_long_context_beside_short_ones(
    *, page_size: int, window: int | None, has_sinks: bool
) -> None:
    """The long context is cut into many pieces, the short ones into none, beside a prompt."""
    spans = ((5, 1), (70, 30), (2001, 1), (64, 1), (1, 1), (300, 1), (129, 1))
    case = Case(spans=spans, heads=(2, 1), page_size=page_size, window=window, has_sinks=has_sinks)
    laid = Laid(case, DEVICE)
    attention = TritonAttention(laid.batch)
    got_THV = attention.read(laid.read)
    assert relative_error(got_THV, laid.expected()) < 1e-5
    (work,) = laid.batch.work_lists.values()
    pieces = work.pieces_S2[:, 1].tolist()
    assert pieces[:2] == [1, 0]
    assert pieces[2] == (4 if window is None else 3)
    assert pieces[3:] == [1, 1, 1, 1]
    attention.read(laid.read)
    assert list(laid.batch.work_lists.values()) == [work], "layers share a list"


def test_an_argument_that_a_kernel_lacks_is_refused() -> None:
    """A misspelt name would bring compilations back while requests wait."""
    with pytest.raises(ValueError, match=r"kernel has no argument \['num_kyes'\]"):

        @jit("num_keys", "num_kyes")
        def kernel(num_keys: int) -> None:
            """Do nothing."""


def outside(module: str, *arguments: str) -> list[dict[str, Any]]:
    """The lines that a module of tests prints, where kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


def check_room(lines: list[dict[str, Any]], capability: int) -> None:
    """Check that programs of each kernel fit a processor, as many as contexts are cut for."""
    card = CARDS[capability]
    for line in lines:
        assert line["shared_bytes"] <= MOST_SHARED, line
        num_programs = line.get("programs", 1)
        assert card.has_room(num_programs, line["shared_bytes"]), line
        threads = 32 * line["warps"]
        assert num_programs * threads * -(-line["registers"] // 8) * 8 <= REGISTERS, line
    decodes = [line for line in lines if line["kernel"] == "_decode"]
    assert decodes
    assert all("programs" in line for line in decodes)
    assert all(line["shared_bytes"] <= line["foreseen_bytes"] for line in decodes)


def test_kernels_of_a_step_compile_for_a_card() -> None:
    """The interpreter lets a name have two types, which the compiler refuses.

    This card's processors have the least shared memory, which is what kernels are tuned by.
    """
    capability = 86
    lines = outside("tests.gpu_targets", str(capability), "few")
    read = {"_put", "_decode", "_merge", "_turn", "_gather", "_place", "_attend"}
    drawn = {"_best", "_scale", "_look", "_keep", "_find"}
    assert {line["kernel"] for line in lines} == read | drawn
    assert all(line["stack_bytes"] <= (64 if line["case"] == "wide" else 8) for line in lines)
    check_room(lines, capability)


@pytest.mark.long
def test_nothing_is_compiled_after_the_warm_up() -> None:
    """Random mixed steps of each architecture differ in lengths, tables and rows of logits.

    Without names in `jit`, 200 compiled 39 to 74 kernels while requests waited. Each launch is
    compared with Triton's own.
    """
    lines = outside("tests.compilations")
    assert len(lines) == len(ARCHITECTURES) + 3
    for line in lines:
        assert line["serving"] == {}, line
        assert line["direct"] == line["launches"] > 100, line
        read = "_read" if line["architecture"] == "exact" else "_decode"
        assert {"_put", read, "_merge"} <= set(line["warm_up"])


@pytest.mark.long
@pytest.mark.parametrize("capability", CARDS)
def test_the_kernels_of_exact_batches_compile_for_a_card(capability: int) -> None:
    """Each form of a product, and reads whose pieces are stored."""
    lines = outside("tests.gpu_targets", str(capability), "exact")
    assert {line["kernel"] for line in lines} == {"_read", "_merge", "_multiply", "_add_parts"}
    assert all(line["shared_bytes"] <= MOST_SHARED for line in lines)
    products = [line for line in lines if line["case"].endswith("bfloat16")]
    assert all(line["stack_bytes"] == 0 for line in products)


@pytest.mark.long
@pytest.mark.parametrize("capability", CARDS)
def test_the_kernels_compile_for_a_card(capability: int) -> None:
    """The interpreter cannot show whether registers and shared memory suffice."""
    lines = outside("tests.gpu_targets", str(capability))
    compiled = {(line["case"], line["kernel"]) for line in lines}
    every = {"_put", "_decode", "_merge", "_turn", "_gather"}
    assert {kernel for case, kernel in compiled if case == "all"} == every | {"_attend"}
    for name in ("llama", "sinks"):
        assert {kernel for case, kernel in compiled if case == name} == every | {"_place"}
    placed = every | {"_add", "_finish"}
    assert {kernel for case, kernel in compiled if case == "chunks"} == placed
    assert {kernel for case, kernel in compiled if case == "rerope, all"} == placed | {"_attend"}
    # Values that a thread spills from registers to memory; a few numbers are no spill.
    narrow = [line for line in lines if "wide" not in line["case"]]
    assert all(line["stack_bytes"] <= 32 for line in narrow)
    assert all(line["stack_bytes"] <= 640 for line in lines)  # float32 heads of 256
    codes = {kernel for case, kernel in compiled if case == "as served, codes"}
    assert codes == every | {"_place"}
    registers = {line["case"]: line["registers"] for line in lines if line["kernel"] == "_decode"}
    assert registers["as served, codes"] <= registers["as served"]
    states = {"_convolve", "_keep", "_delta", "_norm_and_gate"}
    assert {kernel for case, kernel in compiled if case.startswith("states")} == states
    assert all(line.get("waits", True) for line in lines)
    check_room(lines, capability)
