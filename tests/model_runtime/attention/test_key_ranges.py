"""Ranges of keys in the CPU's kernel and in the torch reference, against explicit distances."""

import pytest
import torch

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.rope import DualChunk, PositionMethod, ReRope, RopeConfigError, SelfExtend
from tests.oracles import position_oracle as oracle
from tests.oracles.range_cases import CPU, LAYERS, METHODS, PAGE, PlacedReads, largest_error


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        *((name, "all") for name in METHODS),
        *(("rerope", layer) for layer in LAYERS if layer != "all"),
        *((name, "plain") for name in ("string", "sinks", "dual_chunk")),
    ],
)
def test_both_backends_equal_the_distances_in_float64(name: str, layer: str) -> None:
    """Every method, with every feature of a layer, beside sequences without a method."""
    torch.manual_seed(0)
    method, distance = METHODS[name]
    share = 0.5 if layer in ("window", "all") else 1.0
    laid = PlacedReads(method, share, logn_len=16 if layer in ("plain", "all") else None)
    expected = laid.exact(distance, **LAYERS[layer])
    for backend in (TorchAttention, CpuAttention):
        got = backend(laid.batch).read(laid.read(**LAYERS[layer]))
        assert largest_error(got, expected) < 1e-5, backend.__name__


def test_a_temperature_of_dual_chunk_is_on_the_rotated_dimensions() -> None:
    """Qwen's s multiplies query and key."""
    method = DualChunk(32, 8, temperature_factor=1.25)
    laid = PlacedReads(method)
    expected = laid.exact(oracle.dual_chunk(24, 32))
    for backend in (TorchAttention, CpuAttention):
        assert largest_error(backend(laid.batch).read(laid.read()), expected) < 1e-5


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "sinks"])
def test_bfloat16_in_pairs_stays_within_its_rounding(name: str) -> None:
    """Pairs round queries, keys and probabilities once, as the plain read does."""
    method, distance = METHODS[name]
    laid = PlacedReads(method, dtype=torch.bfloat16, page=16 if name != "dual_chunk" else 8)
    expected = laid.exact(distance)
    assert largest_error(CpuAttention(laid.batch).read(laid.read()), expected) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_queries_within_the_native_part_have_the_bits_of_the_plain_kernel(
    name: str, dtype: torch.dtype
) -> None:
    """The first M, w or s + r positions need no method."""
    method = METHODS[name][0]
    laid = PlacedReads(method, dtype=dtype)
    ranged = CpuAttention(laid.batch).read(laid.read())
    spans = [span._replace(table_id=laid.ids[1]) for span in laid.spans]
    plain = CpuAttention(build_batch(spans, PAGE, CPU)).read(laid.read())
    positions = laid.batch.position_ids_1T[0]
    is_native = positions < method.num_native
    assert is_native.sum() > 5 or name == "rerope, window of 1"
    assert torch.equal(ranged[is_native], plain[is_native])
    table_ids = torch.repeat_interleave(
        laid.batch.table_id_S, torch.tensor([queries for _, queries in laid.contexts])
    )
    neighbours = table_ids == laid.ids[1]
    assert torch.equal(ranged[neighbours], plain[neighbours])
    assert not torch.equal(ranged[~neighbours], plain[~neighbours])


@pytest.mark.parametrize("name", METHODS)
def test_rows_have_the_same_bits_alone_in_any_chunk_and_on_any_thread(name: str) -> None:
    """A row's bits depend on its own ranges."""
    laid = PlacedReads(METHODS[name][0])
    whole = CpuAttention(laid.batch).read(laid.read())
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(CpuAttention(laid.batch).read(laid.read()), whole)
    finally:
        torch.set_num_threads(threads)
    span, rows = laid.spans[0], laid.query[:120]
    for size in (1, 7, 8, 23, 24, 25):
        parts = []
        for first in range(0, 120, size):
            piece = range(first, min(120, first + size))
            batch = build_batch(
                [Span([0] * len(piece), first, span.pages, span.table_id, range(0))], PAGE, CPU
            )
            read = laid.read()
            query = rows[piece.start : piece.stop]
            arguments = (read.keys_NKDO, read.values_NKOV, read.tables, read.scaling)
            parts.append(CpuAttention(batch).read(LayerRead(query, *arguments, None, None, None)))
        assert torch.equal(torch.cat(parts), whole[:120]), size


def test_memory_behind_the_last_token_is_never_read() -> None:
    """NaN in unused offsets leaves every row as it was."""
    laid = PlacedReads(DualChunk(32, 8))
    clean = CpuAttention(laid.batch).read(laid.read())
    used = torch.zeros(laid.keys.shape[0], PAGE, dtype=torch.bool)
    for (context, _), span in zip(laid.contexts, laid.spans, strict=True):
        for position in range(context):
            used[span.pages[position // PAGE], position % PAGE] = True
    laid.keys.permute(0, 3, 1, 2)[~used] = torch.nan
    laid.values.transpose(1, 2)[~used] = torch.nan
    assert torch.equal(CpuAttention(laid.batch).read(laid.read()), clean)


@pytest.mark.long
def test_logn_follows_the_true_position_of_a_query_that_stands_elsewhere() -> None:
    """The multiplier, read off the weights of two keys that differ in one unrotated number."""
    context = 100
    laid = PlacedReads(ReRope(8), 0.5, logn_len=16, contexts=((context, 1),))
    laid.keys.zero_()
    laid.values.zero_()
    pages = laid.spans[0].pages
    laid.keys[pages[0], :, -1, 0] = 1.0  # key 0, in the far range
    laid.values[pages[0], :, 0, 0] = 1.0
    laid.query = torch.zeros_like(laid.query)
    laid.query[..., -1] = 1.0
    weight = CpuAttention(laid.batch).read(laid.read(scaling=1.0))[0, 0, 0].double()
    # weight = e^m / (e^m + 99), so m = ln(99 weight / (1 - weight)).
    multiplier = (weight * (context - 1) / (1 - weight)).log()
    expected = torch.tensor(float(context)).double().log() / torch.tensor(16.0).double().log()
    assert multiplier == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (DualChunk(30, 10), r"20, which must be a multiple of the page size \(8\)"),
        (SelfExtend(12, 6), r"6, which must divide the page size \(8\) or be a multiple of it"),
    ],
)
def test_a_table_whose_keys_do_not_fit_the_pages_is_refused(
    method: PositionMethod, message: str
) -> None:
    """Both numbers are in the message."""
    with pytest.raises(RopeConfigError, match=message):
        PlacedReads(method)
