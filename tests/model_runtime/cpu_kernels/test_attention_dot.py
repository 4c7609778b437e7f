"""Both ways to multiply, against float64: float32 numbers one by one, and bfloat16 in pairs.

Shapes: T = flat query tokens, H = query heads, C = keys of a sequence, K = key heads, D = key
dimensions, O = offsets in a page, N = pages.
"""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ropewalk.model_runtime.attention import cpu_backend
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.cpu_kernels.attention import attention_dot
from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import uses_pairs
from ropewalk.model_runtime.cpu_kernels.attention.bf16_dot import HAS_PAIR_PRODUCTS
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy
from tests.oracles.attention_cases import Case, Laid, cases, relative_error, rotated

CASES = {name: case for name, case in cases().items() if not name.endswith("16")}
needs_pairs = pytest.mark.usefixtures("in_pairs")


@pytest.fixture
def in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in pairs, whether or not that is fast here."""
    if not HAS_PAIR_PRODUCTS:
        pytest.skip("no products of pairs here")
    monkeypatch.setattr(attention_dot, "pairs_pay", lambda: True)


def laid(case: Case, dtype: torch.dtype = torch.bfloat16) -> Laid:
    """A case whose cache has a CPU's layout."""
    return Laid(replace(case, dtype=dtype, row_keys=False), torch.device("cpu"))


def answer(case: Laid) -> Tensor:
    """The kernel's answer, float32 [T, H, V]."""
    return CpuAttention(case.batch).read(case.read)


def row_errors(got_THV: Tensor, expected_THV: Tensor) -> Tensor:
    """For every row and head, the error's length over the expected length, [T, H]."""
    return (got_THV.double() - expected_THV).norm(dim=-1) / expected_THV.norm(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_one_by_one_every_row_is_float32(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Rows of a bfloat16 cache are float32 too, if products in pairs would not be faster."""
    monkeypatch.setattr(attention_dot, "pairs_pay", lambda: False)
    case = laid(CASES[name], dtype)
    assert not uses_pairs(as_numpy(case.read.keys_NKDO))
    assert float(row_errors(answer(case), case.expected()).max()) < 2e-5


@needs_pairs
@pytest.mark.parametrize("name", CASES)
def test_in_pairs_every_row_is_as_close_as_bfloat16_allows(name: str) -> None:
    """Keys, queries and probabilities are each rounded once, and nothing is left out.

    A rounding is by 2^-9 of the number, root mean square. Products of D random numbers, scaled by
    D^-0.5, have a deviation of 1, times that of log-n and attention factors, s: 2.5 at most here.
    A logit is off by 2^-9 * s * sqrt(2), a probability by that and its own 2^-9. A sum of random
    values is off by the same part of its length: 0.7 percent at most. One row may be five times
    worse.
    """
    case = laid(CASES[name])
    got, expected = answer(case), case.expected()
    assert relative_error(got, expected) < 1e-2
    assert float(row_errors(got, expected).max()) < 3.6e-2


@needs_pairs
@pytest.mark.parametrize("name", ["plain", "wide head", "one head for all", "page of 256"])
def test_in_pairs_errors_are_those_of_torchs_attention(name: str) -> None:
    """Torch reads the rotated queries and keys in bfloat16; the bound is twice its error."""
    case = laid(CASES[name])
    rows = []
    for index, place in enumerate(case.batch.places_S):
        end = place.first_position + place.num_tokens
        queries_T, keys_C = torch.arange(place.first_position, end), torch.arange(end)
        query_THD = case.read.query_THD[place.begin : place.begin + place.num_tokens]
        query_THD, key_CKD = rotated(case, index, query_THD, queries_T, keys_C)
        answer_HTV = scaled_dot_product_attention(
            query_THD.to(torch.bfloat16).transpose(0, 1),
            key_CKD.to(torch.bfloat16).transpose(0, 1),
            case.values[index].to(torch.bfloat16).transpose(0, 1),
            attn_mask=queries_T[:, None] >= keys_C,
            scale=case.read.scaling,
            enable_gqa=True,
        )
        rows.append(answer_HTV.transpose(0, 1))
    expected = case.expected()
    theirs = relative_error(torch.cat(rows), expected)
    assert relative_error(answer(case).to(torch.bfloat16), expected) < 2 * theirs


@needs_pairs
@pytest.mark.parametrize("kind", ["keys", "queries"])
def test_nan_stays_nan_in_pairs(kind: str) -> None:
    """A NaN in the cache affects only the rows that attend to it."""
    case = laid(Case(spans=((70, 70),)))
    clean = answer(case)
    token = 41
    if kind == "keys":
        page = case.batch.page_table_SN[0, token // 16]
        case.read.keys_NKDO[page, :, 3, token % 16] = torch.nan
    else:
        case.read.query_THD[token, :, 20] = torch.nan
    got = answer(case)
    end = len(got) if kind == "keys" else token + 1
    assert got[token:end].isnan().all()
    assert torch.equal(got[:token], clean[:token])
    assert torch.equal(got[end:], clean[end:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arrays_are_let_go(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The function called for each row counts no references, so a leak could go unseen."""
    handed = []

    def noted(numbers: Tensor) -> Any:
        array = as_numpy(numbers)
        handed.append(weakref.ref(array))
        return array

    monkeypatch.setattr(cpu_backend, "as_numpy", noted)
    answer(laid(CASES["plain"], dtype))
    gc.collect()  # a compiler that has just run leaves cycles behind
    assert handed
    assert all(reference() is None for reference in handed)


@needs_pairs
@pytest.mark.parametrize(
    ("dim", "page_size", "dtype", "is_expected"),
    [
        (64, 64, np.uint16, True),
        (24, 16, np.uint16, True),
        (64, 64, np.float32, False),
        (63, 64, np.uint16, False),
        (64, 24, np.uint16, False),
    ],
)
def test_which_caches_are_multiplied_in_pairs(
    dim: int, page_size: int, dtype: type, *, is_expected: bool
) -> None:
    """Pairs need bfloat16, an even number of dimensions, and pages of whole registers."""
    assert uses_pairs(np.empty((1, 1, dim, page_size), dtype)) == is_expected
