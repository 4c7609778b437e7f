"""The arguments of the compiled kernels, by name.

numba finds the type of a plain tuple in C, but that of a NamedTuple in Python, which takes 2
microseconds for each. So Python passes the plain tuples of `unnamed()`, and a kernel's first lines
name them again. Between kernels names are free.

Shapes: T = flat query tokens, C = columns that hold head beside head, H = query heads, K = key
heads, D = key dimensions, V = value dimensions, S = sequences or tables, N = pages,
O = offsets in a page, P = rotated pairs, R = rows, B = rows of a block, L = lanes or layers,
G = groups of layers. In scratch arrays O and V are rounded up to whole SIMD registers. Of a
program, O = operations, F = their fields, X = their factors.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Numbers: TypeAlias = NDArray[np.float32 | np.uint16 | np.int8]  # bits of bfloat16; codes
Ints: TypeAlias = NDArray[np.int64]

# A kernel is compiled for one type of each field, so what is absent has that type, too.
NO_SOFTCAP = np.float32(0.0)
NO_SINKS: Floats = np.empty(0, np.float32)


class RotationArrays(NamedTuple):
    """The rotation tables of all profiles, for one layer type."""

    start_cos_SNP: Floats  # of the angles of each page's first position
    start_sin_SNP: Floats
    offset_cos_SPO: Floats  # of the angles inside a page
    offset_sin_SPO: Floats
    attention_factor_S: Floats  # multiplies rotated queries and rotated keys
    logn_S: NDArray[np.float64]  # ln(L) of the log-n switch; 0: off


class AngleArrays(NamedTuple):
    """Cosines and sines; `RotationArrays` has two pairs of them."""

    cos: Floats  # [S, N, P] of page starts, or [S, P, O] of offsets
    sin: Floats


class AttentionParams(NamedTuple):
    """The parameters of a layer's attention, besides its pages."""

    tables: RotationArrays
    scaling: np.float32  # multiplies every logit
    window: int = 0  # keys that a query sees, itself included; 0: all
    softcap: np.float32 = NO_SOFTCAP  # c: logits become c * tanh(logit / c); 0: none
    sinks_H: Floats = NO_SINKS  # one more logit per head, without a value

    def unnamed(self) -> tuple[Any, ...]:
        """Return plain tuples for a kernel, which names them again."""
        return tuple(self.tables), *self[1:]


class SequenceArrays(NamedTuple):
    """The sequences of a step."""

    page_table_SN: NDArray[np.int32]  # padded with 0
    cu_seqlens_S1: Ints  # [S + 1], start of each sequence's tokens in the flat row
    first_position_S: Ints  # absolute position of each sequence's first token in the step
    table_id_S: Ints  # id of each sequence's rotation table


class Destinations(NamedTuple):
    """The places of the step's new keys and values in the cache."""

    page_T: Ints
    offset_T: Ints  # in the page


class PageArrays(NamedTuple):
    """The cache of one layer; keys are not rotated."""

    keys_NKDO: Numbers
    values_NKOV: Numbers


class QueryTile(NamedTuple):
    """Query tokens of one sequence under the query heads of one key head.

    A row is one token under one head. Rows are ordered by token.
    """

    num_rows: int
    position: int  # absolute, of the first token
    group: int  # query heads of the key head, so rows of a token
    table_id: int  # of the sequence's rotation table


class Scratch(NamedTuple):
    """The working memory of a tile and a block, kept between pages.

    `Numbers` are what is multiplied: float32, or bfloat16 in pairs (attention_dot.py).
    """

    rotated_RD: Floats  # queries, rotated to their positions and scaled
    keys_DO: Numbers  # a page's keys, rotated by their offsets
    query_BD: Numbers  # a block's queries, rotated back by the page's start
    scores_BO: Floats
    probs_BO: Numbers  # exp(score - running maximum)
    row_max_R: Floats  # running maximum of the scores
    row_sum_RL: Floats  # running sum of the probabilities, one in each lane
    acc_RV: Floats  # running sum of probabilities times values


class StateArrays(NamedTuple):
    """The slots of states in a fused decode step, and the parts of its sequences."""

    addresses_LX: Ints  # of each layer with states: its last inputs, and its recurrent state
    num_slots: int
    parts_X4: Ints  # see `Batch.parts_X4`


class FusedStep(NamedTuple):
    """The arguments of a fused decode step that are the same for all threads."""

    fields_OF: Ints  # of each operation (fused_decode.py)
    factors_OX: Floats
    addresses_LX: Ints  # of each layer's two tensors; of quantised pages also their bits
    num_pages: int
    page_size: int
    like_scale: Floats  # any array of the type of a norm's scale
    destinations: Destinations
    sequences: SequenceArrays
    page_table_GSN: NDArray[np.int32]  # of all groups of layers; `sequences` has the first one
    page_GT: Ints  # `destinations` has the first one
    group_L: Ints  # the group of each layer
    states: StateArrays
    tables: tuple[RotationArrays, ...]  # of the kinds of layers, as plain tuples

    def unnamed(self) -> tuple[Any, ...]:
        """Return plain tuples for the kernel, which names them again."""
        *others, tables = self
        plain = (tuple(each) if isinstance(each, tuple) else each for each in others)
        return *plain, tuple(tuple(each) for each in tables)
