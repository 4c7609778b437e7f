"""Parts in which the GPU reads a prompt over quantised pages have each key of a row once."""

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.quantised.own_pages import own_pages
from ropewalk.model_runtime.attention.quantised.quantised_prompts import (
    QuantisedGroup,
    QuantisedPrompts,
    Source,
)
from ropewalk.model_runtime.attention.work_list import Cut, contexts_of
from ropewalk.rope import DualChunk, PositionMethod, ReRope, SelfExtend, Shifted, Sinks

PAGE = 32
CPU = torch.device("cpu")
METHODS: tuple[PositionMethod | None, ...] = (
    *(None, None, None, ReRope(40), ReRope(1), SelfExtend(12, 4), DualChunk(48, 16)),
    *(Shifted(50, 5), Sinks(3, 70)),
)


def seen(group: QuantisedGroup, part: int, row: int) -> range:
    """The keys that a row of a part sees, from the part's first one; as flash attention has it."""
    parts = group.placed.parts
    num_tokens, num_keys = (
        int(each[part + 1] - each[part]) for each in (parts.cu_tokens_G1, parts.cu_keys_G1)
    )
    own = num_keys - num_tokens + row
    left, right = parts.mask
    begin = 0 if left < 0 else max(0, own - left)
    return range(begin, num_keys if right < 0 else min(num_keys, own + 1))


def count(
    group: QuantisedGroup, table: NDArray[np.int32], width: int, keys: NDArray[np.int64]
) -> None:
    """Add 1 to each key that a row sees, where its page is the one of its source."""
    parts = group.placed.parts
    for part in range(len(parts.cu_tokens_G1) - 1):
        first, end = parts.cu_tokens_G1[part : part + 2].tolist()
        first_key, page_at = int(parts.first_key_G[part]), int(parts.page_at_G[part])
        for token in range(first, end):
            row = int(parts.row_T[token])
            for index in seen(group, part, token - first):
                key = first_key + index
                if group.page_G is None:
                    assert page_at // width == 0  # the only prompt
                    page = table[0, (page_at + key // PAGE) % width]
                    is_right = page == key // PAGE
                else:
                    page = int(group.page_G[page_at + key // PAGE])
                    is_right = group.source is not Source.QUANTISED
                assert is_right
                keys[row, key] += 1 if group.source is Source.QUANTISED else 1000 * (page + 1)


@pytest.mark.parametrize("seed", range(30))
def test_each_key_is_read_once_from_its_source(seed: int) -> None:
    """Chunks that begin and end anywhere, with windows and position methods."""
    draw = random.Random(seed)
    first, num_tokens = draw.choice((0, 1, 31, 32, 70, 200)), draw.choice((2, 31, 32, 65, 180))
    window, method = draw.choice((None, None, 1, 2, 33, 100)), draw.choice(METHODS)
    methods: Mapping[int, PositionMethod] = {} if method is None else {0: method}
    num_pages = -(-(first + num_tokens) // PAGE)
    span = Span([0] * num_tokens, first, list(range(num_pages)), 0, range(0), tail_page=7)
    store: Any = SimpleNamespace(page_size=PAGE, most_numbers=1, dtype=torch.float32, device=CPU)
    batch, own = build_batch([span], PAGE, CPU), own_pages([span], store)
    prompts = QuantisedPrompts(batch, own, methods)
    keys = np.zeros((num_tokens, num_pages * PAGE), np.int64)
    table = batch.page_table_SN.numpy()
    for group in prompts.groups(window, 16):
        rows = group.placed.parts.row_T.tolist()
        assert len(rows) == len(set(rows)), "a row is twice in a group"
        count(group, table, table.shape[1], keys)
    expected = np.zeros_like(keys)
    last_page = (first + num_tokens - 1) // PAGE
    position_T = np.arange(first, first + num_tokens)
    ranges = [(position_T * 0, position_T + 1)]
    if method is not None:
        found = method.ranges(torch.from_numpy(position_T))
        ranges = [(begin.numpy(), end.numpy()) for begin, end, _ in found]
    for begin_T, end_T in ranges:
        for row, (begin, end) in enumerate(zip(begin_T.tolist(), end_T.tolist(), strict=True)):
            position = first + row
            for key in range(max(begin, position + 1 - window if window else 0), end):
                page = position // PAGE
                # The tail page, or the one that is staged for an earlier page of the chunk.
                exact = 7 if page == last_page else page - first // PAGE
                expected[row, key] += 1 if key // PAGE < page else 1000 * (exact + 1)
    assert np.array_equal(keys, expected)
    assert keys.any(1).all()


@pytest.mark.parametrize("seed", range(20))
def test_decodes_read_their_own_page_apart(seed: int) -> None:
    """The pieces before it and in it are those of all keys; none crosses its beginning."""
    draw = random.Random(seed)
    positions = [draw.choice((-1, 0, 31, 32, 33, draw.randint(0, 3000))) for _ in range(5)]
    position_S, table_id_S = np.array(positions), np.zeros(5, np.int64)
    method = draw.choice(METHODS)
    methods: Mapping[int, PositionMethod] = {} if method is None else {0: method}
    cut = Cut(draw.choice((None, 1, 40, 700)), 32, 8, bool(methods))
    whole = contexts_of(position_S, table_id_S, cut, methods)
    apart = contexts_of(position_S, table_id_S, cut._replace(own_page=PAGE), methods)
    num_ranges = len(whole.begin_RS)
    assert len(apart.begin_RS) == 2 * num_ranges
    for s, position in enumerate(positions):
        own = position // PAGE * PAGE
        for r in range(num_ranges):
            every, (before, inside) = (
                set(range(whole.begin_RS[r, s], whole.end_RS[r, s])),
                (
                    set(range(apart.begin_RS[at, s], apart.end_RS[at, s]))
                    for at in (r, num_ranges + r)
                ),
            )
            assert before | inside == every
            assert all(key < own for key in before)
            assert all(key >= own for key in inside)


@pytest.mark.parametrize(("first", "num_groups", "share"), [(8192, 8, 2.5), (8190, 9, 3.5)])
def test_a_large_chunk_has_few_groups(first: int, num_groups: int, share: float) -> None:
    """Of 2,048 tokens (docs/design/kv-cache.md); `share`: keys between, of the chunk's keys."""
    span = Span([0] * 2048, first, list(range(200)), 0, range(0))
    store: Any = SimpleNamespace(page_size=64, most_numbers=1, dtype=torch.float32, device=CPU)
    batch, own = build_batch([span], 64, CPU), own_pages([span], store)
    groups = QuantisedPrompts(batch, own, {}).groups(None, 64)
    assert len(groups) == num_groups
    quantised = [each.placed.parts.num_keys for each in groups if each.source is Source.QUANTISED]
    assert quantised[0] == first // 64 * 64, "keys before the chunk are widened once"
    assert sum(quantised[1:]) == pytest.approx(share * 2048, rel=0.1)
