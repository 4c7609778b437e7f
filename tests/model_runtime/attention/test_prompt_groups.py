"""The host's lists of the GPU's prefill: packed rows, groups and tiles."""

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention import prompt_groups
from ropewalk.model_runtime.attention.batch import Batch, Span, build_batch
from ropewalk.model_runtime.attention.prompt_groups import PromptGroup, Prompts

PAGE = 4
# Context, query tokens and table of each sequence; the second and the last have one token.
SEQUENCES = ((7, 7, 2), (9, 1, 0), (20, 3, 1), (6, 2, 0), (1, 1, 0))


def batch_of(sequences: tuple[tuple[int, int, int], ...]) -> Batch:
    """A step's batch; page numbers do not matter here."""
    spans = [
        Span([0] * tokens, context - tokens, range(-(-context // PAGE)), table_id, range(0))
        for context, tokens, table_id in sequences
    ]
    return build_batch(spans, PAGE, torch.device("cpu"))


def parts(group: PromptGroup) -> dict[str, Tensor]:
    """The tensors of a group."""
    named = {name: getattr(group, name) for name in PromptGroup.__slots__}
    return {name: each for name, each in named.items() if isinstance(each, Tensor)}


def test_query_tokens_of_prompts_are_packed() -> None:
    """Single tokens are left out; positions and tables are each token's own."""
    prompts = Prompts(batch_of(SEQUENCES))
    assert len(prompts) == 3
    queries = prompts.queries
    assert queries.row_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert queries.position_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 17, 18, 19, 4, 5]
    assert queries.table_id_T.tolist() == [2] * 7 + [1] * 3 + [0] * 2


def test_keys_of_prompts_are_packed() -> None:
    """All keys up to a prompt's last token are taken, and tiles do not cross prompts."""
    (group,) = Prompts(batch_of(SEQUENCES)).groups(None, 4)
    assert (len(group.row_T), group.num_keys) == (12, 33)
    assert group.mask == (-1, 0)
    assert (group.most_tokens, group.most_keys) == (7, 20)
    assert group.cu_tokens_G1.tolist() == [0, 7, 10, 12]
    assert group.cu_keys_G1.tolist() == [0, 7, 27, 33]
    assert group.first_key_G.tolist() == [0, 0, 0]
    assert group.page_at_G.tolist() == [0, 2 * 5, 3 * 5]  # the page table has 5 columns
    assert group.table_id_G.tolist() == [2, 1, 0]
    keys = [[0, 0], [0, 4], *([1, first] for first in range(0, 20, 4)), [2, 0], [2, 4]]
    assert group.key_tiles_W2.tolist() == keys
    assert group.token_tiles_W2.tolist() == [[2, 0], [1, 0], [0, 4], [0, 0]]


@pytest.mark.parametrize(
    ("window", "first_keys"), [(1, [0, 17, 4]), (3, [0, 15, 2]), (20, [0, 0, 0])]
)
def test_keys_before_a_window_are_left_out(window: int, first_keys: list[int]) -> None:
    """The first token of a chunk sees `window` keys, its own included."""
    (group,) = Prompts(batch_of(SEQUENCES)).groups(window, 4)
    assert group.first_key_G.tolist() == first_keys
    assert group.mask == (window - 1, 0)
    nums = [end - first for end, first in zip((7, 20, 6), first_keys, strict=True)]
    assert group.cu_keys_G1.diff().tolist() == nums


@pytest.mark.parametrize(
    ("most_keys", "sizes"), [(33, [33]), (32, [27, 6]), (26, [7, 26]), (10, [7, 20, 6])]
)
def test_the_keys_of_a_group_are_bounded(
    most_keys: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with more keys than the bound is alone; every query token is in one group."""
    monkeypatch.setattr(prompt_groups, "MOST_KEYS", most_keys)
    groups = Prompts(batch_of(SEQUENCES)).groups(None, 4)
    assert [group.num_keys for group in groups] == sizes
    rows = torch.cat([group.row_T for group in groups])
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]


def test_the_address_of_each_list_has_the_same_alignment() -> None:
    """An argument whose alignment changed would make Triton compile a kernel again."""
    for num_prompts in range(1, 6):
        batch = batch_of(tuple((5 + number, 2 + number, 0) for number in range(num_prompts)))
        (group,) = Prompts(batch).groups(None, 2)
        tensors = parts(group)
        assert len(tensors) == 8
        first = min(each.data_ptr() for each in tensors.values())
        for name, each in tensors.items():
            assert each.dtype == torch.int32, name
            assert (each.data_ptr() - first) % 16 == 0, name
            assert each.is_contiguous(), name
