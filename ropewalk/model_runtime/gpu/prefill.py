"""The GPU's read for sequences with many query tokens, all prompts of a step together.

One kernel rotates the queries. Another gathers the keys of all prompts from their pages and rotates
them. Then torch's flash attention reads them, or a kernel of our own where that lacks a layer's
feature. The number of launches does not depend on the number of prompts, as long as their keys fit
one group (prompt_groups.py).

Shapes: T = packed query tokens, H = query heads, D = key dimensions, C = packed keys of a group,
K = key heads, V = value dimensions, R = flat rows.
"""

from collections.abc import Callable

from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.prompt_groups import PaddedPrompts, PromptGroup, Prompts
from ropewalk.model_runtime.gpu.attend import attend, rows_at_once
from ropewalk.model_runtime.gpu.flash import flash_attend, serves
from ropewalk.model_runtime.gpu.launch import never_repeat, whole
from ropewalk.model_runtime.gpu.rotate import gathered, turned

# Takes a read, a group, its packed queries, keys and values, and the output of all flat rows.
Attend = Callable[[LayerRead, PromptGroup, Tensor, Tensor, Tensor, Tensor], None]


def prefill(
    read: LayerRead,
    prompts: Prompts | PaddedPrompts,
    page_table_SN: Tensor,
    out_RHV: Tensor,
    chosen: Attend | None = None,
) -> None:
    """Write the output of the prompts to their rows of `out_RHV`. No other row is changed.

    `chosen`: `flash_attend` or `attend`; None: the first one if it supports the layer.
    """
    attention = chosen or (flash_attend if serves(read) else attend)
    turned_THD = turned(read, prompts.queries)
    groups = prompts.groups(read.sliding_window, rows_at_once(read))
    if len(groups) > 1:
        never_repeat()  # the keys of all groups would be kept
    rows = turned_THD.split_with_sizes([len(group.row_T) for group in groups])
    for group, query_THD in zip(groups, rows, strict=True):
        _prefill_group(read, group, page_table_SN, query_THD, out_RHV, attention)


def _prefill_group(
    read: LayerRead,
    group: PromptGroup,
    page_table_SN: Tensor,
    query_THD: Tensor,
    out_RHV: Tensor,
    attention: Attend,
) -> None:
    """Gather and read the keys of one group. They are freed before the next group's."""
    key_CKD, value_CKV = gathered(read, group, page_table_SN, rows_at_once(read))
    whole(attention, read, group, query_THD, key_CKD, value_CKV, out_RHV)
