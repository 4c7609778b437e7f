"""Rows of a GPU with the same bits in any batch: products, attention, mixtures; interpreted."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.batch import Place, Span, build_batch
from ropewalk.model_runtime.attention.exact_work import FIELDS, ExactCut, ExactWork
from ropewalk.model_runtime.attention.work_list import Rows
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.gpu.exact import attention, product
from ropewalk.model_runtime.gpu.exact.attention import ExactAttention
from ropewalk.model_runtime.gpu.exact.mixtures import ExactExperts
from ropewalk.model_runtime.gpu.launch import is_interpreted
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import tiny_checkpoint
from tests.oracles.attention_cases import Case, Laid, cases, relative_error, tolerance
from tests.oracles.triton_attention import exact_products, load_exactly, small_sizes

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="tests/gpu serves compiled kernels")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's deterministic mode fills unwritten memory with NaN."""
    exact_products(monkeypatch)
    small_sizes(monkeypatch)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_exact_and_a_row_has_its_bits_at_any_number(dtype: torch.dtype) -> None:
    """One input part and several, sizes that no tile divides, with a bias and without."""
    torch.manual_seed(1)
    for num_outputs, num_inputs, is_biased in ((70, 40, True), (20, 520, False)):
        weight_NK = torch.randn(num_outputs, num_inputs).to(dtype)
        bias_N = torch.randn(num_outputs).to(dtype) if is_biased else None
        assert product.num_parts(num_outputs, num_inputs) == max(1, num_inputs // 256)
        x_RK = torch.randn(90, num_inputs).to(dtype)
        got_RN = product.product_of(x_RK, weight_NK, bias_N)
        expected_RN = x_RK.double() @ weight_NK.double().T
        if bias_N is not None:
            expected_RN += bias_N.double()
        assert relative_error(got_RN, expected_RN) < (1e-6 if dtype == torch.float32 else 4e-3)
        assert product.find_fault([((weight_NK,), bias_N)], x_RK) is None


def test_a_product_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that follow from the number of rows are what the trial is for."""
    weight_NK = torch.randn(48, 512)
    multiply_into = product.multiply_into

    def by_rows(out: Any, x_RK: Any, *others: Any) -> None:
        monkeypatch.setattr(product, "num_parts", lambda *_: 1 if len(x_RK) > 64 else 2)
        multiply_into(out, x_RK, *others)

    monkeypatch.setattr(product, "multiply_into", by_rows)
    found = product.find_fault([((weight_NK,), None)], weight_NK)
    assert found == "a product of 512 inputs and 48 outputs"


NAMES = ("plain", "all", "page of 24", "odd head, bf16", "sinks, f16")


@pytest.mark.parametrize("name", NAMES)
def test_a_read_equals_float64(name: str) -> None:
    """Decodes and prompts of mixed profiles and lengths, whole and in stored pieces."""
    case = cases()[name]
    laid = Laid(case, CPU)
    got_THV = ExactAttention(laid.batch).read(laid.read)
    assert relative_error(got_THV, laid.expected()) < tolerance(case, CPU)


@pytest.mark.parametrize(
    "case",
    [
        Case(spans=((195, 5), (12, 3)), page_size=64, heads=(3, 1)),
        Case(spans=((195, 5), (70, 1)), heads=(3, 1), window=130, softcap=5.0, has_sinks=True),
        Case(spans=((195, 4),), dtype=torch.bfloat16, heads=(2, 1), page_size=64),
    ],
)
def test_a_token_has_its_bits_in_any_step(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens in one step, each alone, in chunks; pieces that are stored, and that are not."""
    laid = Laid(case, CPU)
    expected_THV = ExactAttention(laid.batch).read(laid.read)
    table_SN, places = laid.batch.page_table_SN.tolist(), laid.batch.places_S

    def read(length: int, index: int | None = None) -> None:
        spans, rows = [], []
        for at, place in enumerate(places):
            if index not in (None, at):
                continue
            for first in range(0, place.num_tokens, length):
                num = min(length, place.num_tokens - first)
                position = place.first_position + first
                spans.append(Span([0] * num, position, table_SN[at], place.table_id, range(0)))
                rows += range(place.begin + first, place.begin + first + num)
        batch = build_batch(spans, case.page_size, CPU)
        part = replace(laid.read, query_THD=laid.read.query_THD[rows])
        assert torch.equal(ExactAttention(batch).read(part), expected_THV[rows])

    for stored, length in ((0, 1), (2**26, 3)):
        monkeypatch.setattr(attention, "_STORED_BYTES", stored)
        read(length)
    read(100, 0)


def test_pieces_of_a_step_are_each_read_once() -> None:
    """By one entry, for lengths of all kinds; a refill fits the same memory."""
    draw = np.random.default_rng(3)
    for count in (1, 2, 7, 40):
        cut = ExactCut(None, 64, 4, 5, 60)
        positions = draw.integers(0, 3000, count)
        work = ExactWork.of([_place(at, each) for at, each in enumerate(positions)], cut, CPU)
        for other in (positions, draw.integers(0, 3000, count), np.full(count, 2999)):
            numbers = cut.refilled(Rows(other, other, other < 0), {})
            assert len(numbers) == work.numbers.numel()
            at = len(numbers) - 3 * count
            entries, merged = numbers[:at].reshape(-1, FIELDS), numbers[at:].reshape(-1, 3)
            slots: list[int] = []
            for row, position in enumerate(other):
                own = entries[(entries[:, 1] == row) & (entries[:, 2] > 0)]
                pieces = [piece for each in own for piece in range(each[4], each[5])]
                assert sorted(pieces) == list(range(position // 64 + 1))
                if own[0, 6] >= 0:
                    (line,) = merged[(merged[:, 0] == row) & (merged[:, 2] > 0)]
                    assert line[2] == len(pieces)
                    slots += range(line[1], line[1] + line[2])
                    assert all(each[6] - line[1] == each[4] for each in own)
                else:
                    assert len(own) == 1
            assert len(set(slots)) == len(slots)
            assert not slots or max(slots) < 60


def _place(at: int, position: int) -> Any:
    return Place(at, 1, int(position), 0)


def test_experts_are_those_of_the_model() -> None:
    """Weights of both layouts, with a bias and without."""
    for name in ("mixtral", "gpt_oss"):
        model: Any = tiny_model(name)
        experts: Any = next(each for each in model.modules() if hasattr(each, "has_gate"))
        num_experts, torch_forward = len(experts.down_proj), experts.forward
        x_RK = torch.randn(37, experts.down_proj.shape[1 if name == "mixtral" else 2])
        index_RC = torch.randn(37, num_experts).topk(2).indices
        weight_RC = torch.rand(37, 2)
        with torch.inference_mode():
            expected_RK = torch_forward(x_RK, index_RC, weight_RC)
            exact = ExactExperts(experts)
            assert torch.allclose(exact(x_RK, index_RC, weight_RC), expected_RK, atol=1e-5)
            assert exact.find_fault(x_RK) is None


def test_a_model_whose_sums_are_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the setting, the model and the part."""
    load_exactly(monkeypatch)
    with pytest.raises(ModelError, match="exact_batches is not served on a GPU for Ministral3"):
        tiny_checkpoint("ministral3", exact_batches=True)


def test_tokens_of_one_sequence_are_one_tile_of_a_captured_step() -> None:
    """As in a step that is not captured; a fifth token begins another tile."""
    cut = ExactCut(None, 64, 4, 5, 60)
    positions, is_same = np.array([9, 10, 11, 12, 13, 7]), np.array([False, *[True] * 4, False])
    numbers = cut.refilled(Rows(positions, np.zeros(6, np.int64), is_same), {})
    entries = numbers[: len(numbers) - 3 * 6].reshape(-1, FIELDS)
    assert [(each[1], each[2], each[3]) for each in entries if each[2]] == [
        *((0, 4, 9), (4, 1, 13), (5, 1, 7)),
    ]
