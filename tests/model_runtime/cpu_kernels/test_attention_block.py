"""Rows that read a page together have the bits of rows that read it alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.register_sums import (
    add_products,
    load_sums,
    no_sums,
    store_sums,
)
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.rope import Profile, Yarn, native_rope

CPU = torch.device("cpu")
CONTEXT = 77
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # heads for a key head, key dimensions, value dimensions, positions in a page
    (1, 64, 64, 64),
    (2, 32, 32, 16),
    (3, 64, 64, 64),
    (4, 128, 128, 32),
    (5, 24, 40, 16),
    (7, 80, 80, 64),
    (8, 64, 64, 8),
    (9, 16, 16, 256),
]


class Sequence:
    """One sequence over shuffled pages, any part of whose tokens may be read."""

    def __init__(  # noqa: PLR0917
        self,
        group: int,
        key_dim: int,
        value_dim: int,
        page_size: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        native = native_rope({"max_position_embeddings": 32, "head_dim": key_dim})
        tables = RopeTables(native, page_size, 512, CPU)
        scaling = Yarn(factor=4.0, original_max_position_embeddings=32)
        self.table_id = tables.id_of(Profile(scaling))
        self.page_size, self.window, self.tables = page_size, window, tables.layer("all")
        self.pages = torch.randperm(-(-CONTEXT // page_size)).tolist()
        self.keys = torch.randn(len(self.pages), 2, key_dim, page_size).to(dtype)
        self.values = torch.randn(len(self.pages), 2, page_size, value_dim).to(dtype)
        self.query = torch.randn(CONTEXT, 2 * group, key_dim).to(dtype)

    def read(self, first: int, end: int, backend: Any = CpuAttention) -> Tensor:
        """The rows of tokens first ... end - 1, as one chunk."""
        span = Span([0] * (end - first), first, self.pages, self.table_id, range(0))
        read = LayerRead(
            self.query[first:end],
            self.keys,
            self.values,
            self.tables,
            self.keys.shape[2] ** -0.5,
            self.window,
            None,
            None,
        )
        found: Tensor = backend(build_batch([span], self.page_size, CPU)).read(read)
        return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chunk_has_the_bits_of_its_tokens(
    shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    """Any cut of a prompt into chunks gives the same bits; torch's backend bounds the error."""
    sequence = Sequence(*shape, window, dtype)
    whole = sequence.read(0, CONTEXT)
    reference = sequence.read(0, CONTEXT, TorchAttention)
    # For products of bfloat16 near 1, test_attention_dot.py looks closer.
    assert torch.allclose(whole, reference, atol=2e-5 if dtype == torch.float32 else 5e-2)
    for at in range(CONTEXT):
        assert torch.equal(sequence.read(at, at + 1)[0], whole[at]), at
    for cut in (1, 16, 30, 70):
        parts = sequence.read(0, cut), sequence.read(cut, CONTEXT)
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 10, 11])
@pytest.mark.parametrize("ill", [37, 38, 63, 64])
def test_a_token_that_is_nan_reaches_no_earlier_row(
    ill: int, window: int | None, dtype: torch.dtype
) -> None:
    """Rows whose window has passed the token stay clean too, though their block loads it."""
    sequence = Sequence(3, 64, 64, 64, window, dtype)
    clean = sequence.read(0, CONTEXT)
    sequence.values[sequence.pages[ill // 64], :, ill % 64] = torch.nan
    got = sequence.read(0, CONTEXT)
    end = CONTEXT if window is None else ill + window
    assert got[ill:end].isnan().all()
    assert torch.equal(got[:ill], clean[:ill])
    assert torch.equal(got[end:], clean[end:])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (8, 2)])
def test_a_tile_is_sums_of_products(rows: int, columns: int) -> None:
    """Sums are added in the order of the loop, and each fused product and sum rounds once."""

    @jit()
    def multiplied(factors_RN: Any, numbers_ND: Any, sums_RD: Any) -> None:
        width = numbers_ND.shape[1]
        sums = load_sums(sums_RD, 0, width, rows, columns)
        for n in range(numbers_ND.shape[0]):
            sums = add_products(
                sums, factors_RN, n, factors_RN.shape[1], numbers_ND, n * width, columns
            )
        store_sums(sums_RD, 0, width, sums, columns)

    @jit()
    def cleared(sums_RD: Any) -> None:
        store_sums(sums_RD, 0, sums_RD.shape[1], no_sums(rows, columns), columns)

    rng = np.random.default_rng(0)
    factors_RN = rng.normal(size=(rows, 5)).astype(np.float32)
    numbers_ND = rng.normal(size=(5, columns * WIDTH)).astype(np.float32)
    sums_RD = rng.normal(size=(rows, columns * WIDTH)).astype(np.float32)
    expected = sums_RD.copy()
    for n in range(5):
        exact = factors_RN[:, n, None].astype(np.float64) * numbers_ND[n] + expected
        expected = exact.astype(np.float32)
    multiplied(factors_RN, numbers_ND, sums_RD)
    assert np.array_equal(sums_RD, expected)
    cleared(sums_RD)
    assert not sums_RD.any()
