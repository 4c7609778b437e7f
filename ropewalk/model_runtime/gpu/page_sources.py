"""The pages that the GPU's decode reads: all in one launch, or quantised ones and own ones in two.

Shapes: T = flat query tokens, S = sequences, N = pages.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.gpu.primitives import key_strides
from ropewalk.model_runtime.gpu.quantised_numbers import KINDS, Records

_OWN_STAGES = 2  # one page is a few tiles, and none waits for the number of a page


class Quantised(NamedTuple):
    """The pages before the queries' own, which a read has exact."""

    records: Records
    own_T: Tensor  # int64, code of each token's own page (`attention/quantised/own_pages.py`)


class Pages(NamedTuple):
    """The pages of a launch."""

    tensors: tuple[Tensor, Tensor]  # of keys and of values
    strides: tuple[int, ...]
    table: Tensor  # of their numbers
    constants: dict[str, Any]
    num_stages: int


def page_sources(
    read: LayerRead, page_table_SN: Tensor, quantised: Quantised | None, num_stages: int
) -> Iterator[Pages]:
    """Yield the pages of each launch. `quantised`: None if `read` has all of the table's pages."""
    exact = read.keys_NKDO, read.values_NKOV
    strides = *key_strides(read.keys_NKDO), *read.values_NKOV.stride()
    if quantised is None:
        yield Pages(exact, strides, page_table_SN, {}, num_stages)
        return
    records = quantised.records
    form = {**records.form, "KIND": KINDS[read.keys_NKDO.dtype]}
    yield Pages(records.pages, records.strides, page_table_SN, form, num_stages)
    yield Pages(exact, strides, quantised.own_T, {"OWN": True}, _OWN_STAGES)
