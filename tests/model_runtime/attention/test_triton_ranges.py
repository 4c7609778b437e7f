"""Position methods in the GPU's kernels: on the device, or by Triton's interpreter without one.

Memory from `torch.empty` is poisoned with NaN.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention import prompt_groups
from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.placed_prompts import PlacedPrompts
from ropewalk.model_runtime.attention.prompt_groups import Mask
from ropewalk.model_runtime.gpu import flash as triton_flash
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.rope import DualChunk, PositionMethod, ReRope, SelfExtend, Shifted, Sinks
from tests.oracles.exact_flash import exact_flash
from tests.oracles.range_cases import CPU, LAYERS, METHODS, PlacedReads, largest_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Every second one has no method: a prompt, a chunk of one that crosses chunks and windows, and
# single tokens at the first and the last place of pages, windows and chunks.
CONTEXTS = (
    *((26, 26), (20, 3), (61, 15), (1, 1), (17, 1), (1, 1), (24, 1), (1, 1), (25, 1)),
    *((1, 1), (49, 1), (33, 1), (73, 1)),
)
# Method, layer and page. One of each kind, because the interpreter needs seconds for a case. A
# tile is in one page of 64.
CASES = [
    *(("rerope", "all", 8), ("self_extend, group in a page", "all", 8), ("string", "all", 64)),
    *(("self_extend, group of pages", "plain", 64), ("sinks", "all", 8)),
    *(("dual_chunk", "plain", 8), ("dual_chunk, far", "all", 8)),
]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Torch's deterministic mode fills unwritten memory with NaN."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize(("name", "layer", "page"), CASES)
def test_reads_equal_the_distances_in_float64(name: str, layer: str, page: int) -> None:
    """Decodes by ranges, prompts by parts, beside sequences without a method."""
    method, distance = METHODS[name]
    share, logn_len = (0.5, 16) if layer == "all" else (1.0, None)
    laid = PlacedReads(method, share, logn_len, page=page, contexts=CONTEXTS, device=DEVICE)
    got = TritonAttention(laid.batch).read(laid.read(**LAYERS[layer]))
    assert largest_error(got, laid.exact(distance, **LAYERS[layer])) < 1e-5


@pytest.mark.parametrize(
    ("name", "most_keys"), [("rerope", 32_768), ("sinks", 60), ("dual_chunk", 60)]
)
def test_flash_attention_reads_the_parts(
    name: str, most_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with sinks; an exact function stands for torch's without a GPU."""
    masks = []
    flash = triton_flash.flash if DEVICE.type == "cuda" else exact_flash

    def noted(*arguments: object) -> object:
        masks.append(arguments[-1])
        assert arguments[5] > 1 or arguments[-1] == Mask(-1, 0), "a row alone without a mask"  # type: ignore[operator]
        return flash(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_flash, "is_available", lambda _: True)
    monkeypatch.setattr(triton_flash, "flash", noted)
    monkeypatch.setattr(prompt_groups, "MOST_KEYS", most_keys)
    method, distance = METHODS[name]
    laid = PlacedReads(
        method,
        logn_len=16,
        dtype=torch.bfloat16,
        contexts=((26, 26), (20, 3), (61, 15), (5, 3), (51, 3), (1, 1), (60, 1)),
        device=DEVICE,
    )
    layer = LAYERS["sink logits"]
    got = TritonAttention(laid.batch).read(laid.read(**layer))
    assert largest_error(got, laid.exact(distance, **layer)) < 2e-2
    windows = {"rerope": 20, "sinks": 17}
    near = {Mask(windows[name] - 1, 0)} if name in windows else set()
    rectangles = {Mask(-1, -1)} if name in {"dual_chunk", "sinks"} else set()
    assert set(masks) == {Mask(-1, 0), *near, *rectangles}


def test_a_part_without_keys_weighs_nothing_and_gives_no_nan() -> None:
    """A row whose log-sum-exp is minus infinity changes neither a part before nor one behind."""
    from ropewalk.model_runtime.gpu.prefill_parts import _add

    none = -torch.inf
    sums, lses = torch.zeros(3, 2, 16), torch.full((3, 2), none)
    parts = torch.randn(3, 3, 2, 16)
    part_lses = torch.tensor([[none, 0.5, none], [1.0, none, none], [none, 2.0, none]])
    rows = torch.arange(3, dtype=torch.int32)
    sums, lses, parts, rows = (each.to(DEVICE) for each in (sums, lses, parts, rows))
    for part, lse in zip(parts, part_lses, strict=True):
        lse_TH = lse[:, None].repeat(1, 2).to(DEVICE)
        _add[(3, 1)](
            part, lse_TH, rows, sums, lses, *lse_TH.stride(),
            HEADS=2, VALUES=16, HEADS_2=2, VALUES_2=16,
        )  # fmt: skip
    torch.testing.assert_close(sums[0], parts[1, 0])
    weights = torch.tensor([0.5, 2.0]).softmax(0).to(DEVICE)
    torch.testing.assert_close(sums[1], weights[0] * parts[0, 1] + weights[1] * parts[2, 1])
    assert torch.equal(sums[2], torch.zeros_like(sums[2]))
    assert lses[:, 0].tolist() == pytest.approx([1.0, np.logaddexp(0.5, 2.0), none])


def test_released_pages_are_never_read() -> None:
    """Sinks leave holes in the page table, and other sequences may have the pages."""
    method, _ = METHODS["sinks"]
    laid = PlacedReads(method, contexts=((77, 7), (9, 1), (97, 1)), device=DEVICE)
    clean = TritonAttention(laid.batch).read(laid.read())
    spans = []
    for (context, queries), span in zip(laid.contexts, laid.spans, strict=True):
        pages = list(span.pages)
        for number in range(
            -(-method.sinks // 8), max(0, context - queries + 1 - method.window) // 8
        ):
            laid.keys[pages[number]] = torch.nan
            laid.values[pages[number]] = torch.nan
            pages[number] = -1
        spans.append(span._replace(pages=pages))
    assert [span.pages.count(-1) for span in spans] == [5, 0, 9]
    batch = build_batch(spans, 8, DEVICE)
    assert torch.equal(TritonAttention(batch).read(laid.read()), clean)


METHODS_OF_PARTS = (
    *(ReRope(100), ReRope(1), SelfExtend(96, 3), Shifted(70, 50), Sinks(4, 60), Sinks(16, 32)),
    *(DualChunk(100, 36), DualChunk(32, 16)),
)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(2, 200)), min_size=1, max_size=3),
    st.sampled_from(METHODS_OF_PARTS),
    st.sampled_from((None, 1, 50, 90, 200)),
)
def test_parts_have_each_key_that_a_row_sees_once(
    chunks: list[tuple[int, int]], method: PositionMethod, window: int | None
) -> None:
    """Every row of a part sees a key, and no row is twice in a group."""
    spans = [Span([0] * num, first, [0] * 100, 0, range(0)) for first, num in chunks]
    batch = build_batch(spans, 16, CPU)
    seen: dict[int, list[tuple[int, int, int, int]]] = {}
    for placed in PlacedPrompts(batch, {0: method}).groups(window, 16):
        group, queries = placed.parts, placed.queries
        assert len(set(group.row_T.tolist())) == len(group.row_T)
        assert queries.placed_T is not None
        tokens, keys = (pairwise(each.tolist()) for each in (group.cu_tokens_G1, group.cu_keys_G1))
        for part, ((begin, end), (first, stop)) in enumerate(zip(tokens, keys, strict=True)):
            num_keys, base = stop - first, int(group.first_key_G[part])
            maps = int(placed.modulus_G[part]), int(placed.divisor_G[part])
            for at in range(begin, end):
                own = num_keys - (end - at)
                left, right = group.mask
                lowest = 0 if left < 0 else max(0, own - left)
                highest = num_keys - 1 if right < 0 else min(num_keys - 1, own + right)
                assert lowest <= highest
                row, placed_at = int(group.row_T[at]), int(queries.placed_T[at])
                assert int(queries.position_T[at]) == int(batch.position_ids_1T[0, row])
                entry = (base + lowest, base + highest + 1, placed_at)
                seen.setdefault(row, []).append((*entry, (base + lowest) % maps[0] // maps[1]))
    for row, position in enumerate(batch.position_ids_1T[0].tolist()):
        expected = []
        ranges = method.ranges(torch.tensor([position]))
        for found, key_map in zip(ranges, method.key_maps, strict=True):
            begin, end, query = map(int, found)
            begin = max(begin, position + 1 - window) if window else begin
            if begin < end:
                at = int(key_map.positions(torch.tensor(begin)))
                expected.append((begin, end, query, at))
        assert sorted(seen[row]) == expected
