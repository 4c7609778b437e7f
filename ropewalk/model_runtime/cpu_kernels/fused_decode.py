"""A decode step of a whole model in one compiled call, for layers/fused.

A step of few rows reads every weight once and computes little. If each norm, product and read is a
call of its own, the code between the calls takes as long as the calls. The reason is that a product
evicts the caches, so the code of every call is fetched again. Here nothing runs between them.

The kernel reads a program: a table of operations over slots. A slot is an array [R, C] of rows.
Shared slots are the outputs of products and of attention. Each thread computes a part of them, and
all threads read them after a barrier. Operations on rows are norms, sums, gates and the like. Every
thread computes them for itself in slots of its own, because that takes less time than a barrier.
The first thread writes to the cache.

The functions are the ones that are otherwise called one by one, in the same order, so the bits are
the same.

Shapes: O = operations, F = fields of an operation, B = slots, L = layers with a cache, R = rows,
C = columns of a slot, K = inputs and N = outputs of a product, X = factors of an operation,
T = threads.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from ropewalk.model_runtime.cpu_kernels.attention.attention import attend, attend_in_pairs, write_kv
from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import uses_pairs
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    Destinations,
    Floats,
    FusedStep,
    Ints,
    Numbers,
    SequenceArrays,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import (
    activate_part,
    multiply_row,
    narrow,
    normalize_row,
    widen,
)
from ropewalk.model_runtime.cpu_kernels.experts.stages import NUM_CHOICES, NUM_EXPERTS, stages
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import pointer_to
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import FLOAT32, PANEL, Multiplying, widened
from ropewalk.model_runtime.cpu_kernels.threads import barrier_wait

# Codes of operations. Those up to _LAST_OF_ROWS compute each row by itself.
(
    NORM, ADD, SUBTRACT, MULTIPLY, ACTIVATE, GATHER, PRODUCT, ATTEND, ROUTE, ENTER, LEAVE,
    DELTA, SHIFT,
) = range(13)  # fmt: skip
_LAST_OF_ROWS = GATHER
_FIRST_OF_MIXTURES = ROUTE
_FIRST_OF_STATES = DELTA

# Fields of an operation. An operand is a slot, its width and the first column that is read.
(
    CODE, BARRIER, OUT, OUT_WIDTH, OUT_AT, COLUMNS,
    FIRST, FIRST_WIDTH, FIRST_AT, SECOND, SECOND_WIDTH, SECOND_AT, THIRD, THIRD_WIDTH, THIRD_AT,
    ADDRESS, LENGTH, OTHER_ADDRESS, OTHER_LENGTH, KIND, DIM, LAYOUT, CHAIN,
    LAYER, TABLES, NUM_HEADS, NUM_KEY_HEADS, VALUE_DIM, WINDOW,
    FOURTH, FOURTH_WIDTH, FOURTH_AT,
) = range(32)  # fmt: skip
NUM_FIELDS = 32
NO_SLOT = -1  # the second operand of ADD and MULTIPLY is then a constant row at ADDRESS

# Factors of an operation: eps of a norm; scaling and soft cap of attention; a gate's of experts.
EPS = SCALING = 0
SOFTCAP = 1

_BLOCK_ROWS = 16  # rows that pass through all operations between two products; they stay in caches


@jit()
def _norm(
    fields_F: Ints, eps: np.float32, x: Numbers, out: Numbers, begin: int, end: int, like: Floats
) -> None:
    """Compute a norm of every DIM columns."""
    dim = fields_F[DIM]
    scale_D = carray(pointer_to(fields_F[ADDRESS], like), dim)
    shift_D = carray(pointer_to(fields_F[OTHER_ADDRESS], like), dim)
    row_D = np.empty(dim, np.float32)
    at, out_at = fields_F[FIRST_AT], fields_F[OUT_AT]
    for r in range(begin, end):
        for d in range(0, fields_F[COLUMNS], dim):
            widen(x[r, at + d : at + d + dim], row_D)
            normalize_row(row_D, scale_D, shift_D, eps, fields_F[KIND])
            narrow(row_D, out[r, out_at + d : out_at + d + dim])


@jit()
def _combine(
    fields_F: Ints, x: Numbers, other: Numbers, out: Numbers, begin: int, end: int, like: Floats
) -> None:
    """Add, subtract or multiply rows, or a row and a constant, rounded once."""
    code, num = fields_F[CODE], fields_F[COLUMNS]
    at, other_at, out_at = fields_F[FIRST_AT], fields_F[SECOND_AT], fields_F[OUT_AT]
    has_constant = fields_F[SECOND] == NO_SLOT
    row_C, other_C = np.empty(num, np.float32), np.empty(num, np.float32)
    if has_constant:
        widen(carray(pointer_to(fields_F[ADDRESS], like), num), other_C)
    for r in range(begin, end):
        widen(x[r, at : at + num], row_C)
        if not has_constant:
            widen(other[r, other_at : other_at + num], other_C)
        if code == ADD:
            for c in range(num):
                row_C[c] += other_C[c]
        elif code == SUBTRACT:
            for c in range(num):
                row_C[c] -= other_C[c]
        else:
            for c in range(num):
                row_C[c] *= other_C[c]
        narrow(row_C, out[r, out_at : out_at + num])


@jit(apart=True)
def run_on_rows(
    fields_F: Ints, factors_X: Floats, addresses_B: Ints, like: Numbers, like_scale: Floats,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Compute one operation on rows `begin` to `end` - 1.

    `like` and `like_scale` are any arrays with the types of slots and of constants.
    """
    code, num = fields_F[CODE], fields_F[COLUMNS]
    x_shape = (end, fields_F[FIRST_WIDTH])
    x = carray(pointer_to(addresses_B[fields_F[FIRST]], like), x_shape)
    out_shape = (end, fields_F[OUT_WIDTH])
    out = carray(pointer_to(addresses_B[fields_F[OUT]], like), out_shape)
    other = x
    if fields_F[SECOND] != NO_SLOT:
        other_shape = (end, fields_F[SECOND_WIDTH])
        other = carray(pointer_to(addresses_B[fields_F[SECOND]], like), other_shape)
    at, out_at = fields_F[FIRST_AT], fields_F[OUT_AT]
    if code == NORM:
        _norm(fields_F, factors_X[EPS], x, out, begin, end, like_scale)
    elif code == ACTIVATE:
        other_at = fields_F[SECOND_AT]
        for r in range(begin, end):
            row, out_row = x[r, at : at + num], out[r, out_at : out_at + num]
            activate_part(row, fields_F[KIND], out_row, 0, num)
            if fields_F[SECOND] != NO_SLOT:  # a gate
                multiply_row(out_row, other[r, other_at : other_at + num])
    elif code == GATHER:
        index_C = carray(pointer_to(fields_F[ADDRESS], fields_F), num)
        for r in range(begin, end):
            for c in range(num):
                out[r, out_at + c] = x[r, index_C[c]]
    else:
        _combine(fields_F, x, other, out, begin, end, like_scale)


@jit()
def run_blocks(
    fields_OF: Ints, factors_OX: Floats, addresses_B: Ints, like: Numbers, like_scale: Floats,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Compute operations on rows `begin` to `end` - 1, a block of rows after the other."""
    for first in range(begin, end, _BLOCK_ROWS):
        last = min(end, first + _BLOCK_ROWS)
        for op in range(fields_OF.shape[0]):
            run_on_rows(
                fields_OF[op], factors_OX[op], addresses_B, like, like_scale, first, last
            )  # fmt: skip


@jit()
def _items(num_sequences: int, num_heads: int, thread: int, num_threads: int) -> Ints:
    """Return a thread's work items of attention, dealt out in turn, int64 [W, 3]."""
    count = num_sequences * num_heads
    items_W3 = np.zeros(((count - thread + num_threads - 1) // num_threads, 3), np.int64)
    for w in range(items_W3.shape[0]):
        item = thread + w * num_threads
        items_W3[w, 0], items_W3[w, 1] = item // num_heads, item % num_heads
    return items_W3


class Access(NamedTuple):
    """How a step reads and writes the cache; its functions are compiled."""

    attend: Any  # the kernel that reads
    pages: Any  # (fields, like, step) -> the plain tuple of a layer's pages, as the kernel takes it
    write: Any  # (fields, keys, values, step) writes a layer's keys and values


@jit()
def _exact_pages(fields_F: Ints, like: Numbers, step: FusedStep) -> tuple[Numbers, Numbers]:
    num_key_heads = fields_F[NUM_KEY_HEADS]
    keys_shape = (step.num_pages, num_key_heads, fields_F[DIM], step.page_size)
    values_shape = (step.num_pages, num_key_heads, step.page_size, fields_F[VALUE_DIM])
    addresses_2 = step.addresses_LX[fields_F[LAYER]]
    keys_NKDO = carray(pointer_to(addresses_2[0], like), keys_shape)
    values_NKOV = carray(pointer_to(addresses_2[1], like), values_shape)
    return keys_NKDO, values_NKOV


@jit()
def _write_exact(fields_F: Ints, key_RC: Numbers, value_RC: Numbers, step: FusedStep) -> None:
    keys_NKDO, values_NKOV = _exact_pages(fields_F, key_RC, step)
    page_T = step.page_GT[step.group_L[fields_F[LAYER]]]
    offset_T = Destinations(*step.destinations).offset_T
    key_at, value_at = fields_F[SECOND_AT], fields_F[THIRD_AT]
    write_kv(key_RC, key_at, value_RC, value_at, page_T, offset_T, keys_NKDO, values_NKOV)


_BITS = np.zeros(1, np.uint16)  # of bfloat16


@jit()
def _rounded_pages(fields_F: Ints, like: Numbers, step: FusedStep) -> tuple[Numbers, Numbers]:  # noqa: ARG001
    return _exact_pages(fields_F, _BITS, step)


@jit()
def _write_rounded(fields_F: Ints, key_RC: Numbers, value_RC: Numbers, step: FusedStep) -> None:
    keys_NKDO, values_NKOV = _rounded_pages(fields_F, key_RC, step)
    page_T = step.page_GT[step.group_L[fields_F[LAYER]]]
    offset_T = Destinations(*step.destinations).offset_T
    key_at, value_at = fields_F[SECOND_AT], fields_F[THIRD_AT]
    write_kv(key_RC, key_at, value_RC, value_at, page_T, offset_T, keys_NKDO, values_NKOV)


EXACT_ACCESS = Access(attend, _exact_pages, _write_exact)
PAIRS_ACCESS = Access(attend_in_pairs, _exact_pages, _write_exact)
ROUNDED_ACCESS = Access(attend, _rounded_pages, _write_rounded)  # bfloat16 beside float32 queries


@cache
def _mixture(multiply_experts: Any) -> Any:
    """Compiled: the operations of a mixture, with the experts' product of rows and panels."""
    enter, leave = stages(multiply_experts)
    multiply_floats = FLOAT32.multiply

    @jit()
    def compute(
        fields_F: Ints, factors_X: Floats, addresses_B: Ints, num_rows: int, like: Numbers,
        step: FusedStep, thread: int, num_threads: int,
    ) -> None:  # fmt: skip
        """Compute a thread's part of an operation; DIM is the number of experts or of columns."""
        code, first, out = fields_F[CODE], fields_F[FIRST], fields_F[OUT]
        dim, like_scale = fields_F[DIM], step.like_scale
        x_RK = carray(pointer_to(addresses_B[first], like), (num_rows, fields_F[FIRST_WIDTH]))
        if code == ROUTE:
            logits_RE = carray(pointer_to(addresses_B[out], like_scale), (num_rows, dim))
            packed_Q = carray(pointer_to(fields_F[ADDRESS], like_scale), fields_F[LENGTH])
            bias_E = carray(pointer_to(fields_F[OTHER_ADDRESS], like_scale), fields_F[OTHER_LENGTH])
            num_panels = (dim + PANEL - 1) // PANEL
            multiply_floats(
                widened(x_RK), packed_Q, bias_E, logits_RE, fields_F[LAYOUT], fields_F[CHAIN],
                num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads,
            )  # fmt: skip
            return
        matrix_F = carray(pointer_to(fields_F[ADDRESS], fields_F), fields_F[LENGTH])
        logits_shape = (num_rows, matrix_F[NUM_EXPERTS])
        logits_RE = carray(pointer_to(addresses_B[fields_F[SECOND]], like_scale), logits_shape)
        between_shape = (num_rows * matrix_F[NUM_CHOICES], dim)
        if code == ENTER:
            between_SI = carray(pointer_to(addresses_B[out], like_scale), between_shape)
            enter(
                matrix_F, factors_X, x_RK, logits_RE, between_SI, like_scale, thread, num_threads
            )  # fmt: skip
        else:
            between_SI = carray(pointer_to(addresses_B[first], like_scale), between_shape)
            out_RN = carray(pointer_to(addresses_B[out], like), (num_rows, fields_F[OUT_WIDTH]))
            leave(matrix_F, between_SI, logits_RE, out_RN, like_scale, thread, num_threads)

    return compute


@jit()
def _nothing(
    fields_F: Ints, factors_X: Floats, addresses_B: Ints, num_rows: int, like: Numbers,
    step: FusedStep, thread: int, num_threads: int,
) -> None:  # fmt: skip
    """Compute nothing, because the program has no mixture, or no layer that keeps states."""


@cache
def _stages(mixture: Any, advance: Any) -> Any:
    """Compiled: the operations of mixtures and of layers with states."""

    @jit()
    def compute(
        fields_F: Ints, factors_X: Floats, addresses_B: Ints, num_rows: int, like: Numbers,
        step: FusedStep, thread: int, num_threads: int,
    ) -> None:  # fmt: skip
        """Compute a thread's part of an operation."""
        if fields_F[CODE] >= _FIRST_OF_STATES:
            advance(fields_F, factors_X, addresses_B, num_rows, like, step, thread, num_threads)
        else:
            mixture(fields_F, factors_X, addresses_B, num_rows, like, step, thread, num_threads)

    return compute


@cache
def _runner(
    multiplying: Multiplying, access: Access, mixture: Any = _nothing, advance: Any = _nothing
) -> Any:
    """Compiled: a step's program, by one way to multiply and one to read."""
    rows_for, multiply = multiplying.rows_for, multiplying.multiply
    attend, pages_of, write = access
    stages = _stages(mixture, advance)

    @jit()
    def product(
        fields_F: Ints, x_RK: Numbers, out_RN: Numbers, thread: int, num_threads: int
    ) -> None:
        """Compute a thread's part of a product."""
        packed_Q = carray(pointer_to(fields_F[ADDRESS], x_RK), fields_F[LENGTH])
        bias_N = carray(pointer_to(fields_F[OTHER_ADDRESS], x_RK), fields_F[OTHER_LENGTH])
        num_panels = (out_RN.shape[1] + PANEL - 1) // PANEL
        begin = num_panels * thread // num_threads
        end = num_panels * (thread + 1) // num_threads
        layout, chain = fields_F[LAYOUT], fields_F[CHAIN]
        multiply(rows_for(x_RK), packed_Q, bias_N, out_RN, layout, chain, begin, end)

    @jit()
    def read(
        fields_F: Ints, factors_X: Floats, query_RC: Numbers, out_RC: Numbers,
        step: FusedStep, thread: int, num_threads: int,
    ) -> None:  # fmt: skip
        """Compute a thread's part of a layer's attention."""
        num_heads, num_key_heads = fields_F[NUM_HEADS], fields_F[NUM_KEY_HEADS]
        sinks_H = carray(pointer_to(fields_F[ADDRESS], step.like_scale), fields_F[LENGTH])
        window, softcap = fields_F[WINDOW], factors_X[SOFTCAP]
        # A plain tuple, as Python passes it: the kernel is compiled for one type.
        params = (step.tables[fields_F[TABLES]], factors_X[SCALING], window, softcap, sinks_H)
        _, begins, firsts, table_ids = step.sequences
        group_table_SN = step.page_table_GSN[step.group_L[fields_F[LAYER]]]
        sequences = (group_table_SN, begins, firsts, table_ids)
        num_sequences = SequenceArrays(*sequences).table_id_S.shape[0]
        items_W3 = _items(num_sequences, num_key_heads, thread, num_threads)
        group = num_heads // num_key_heads
        pages = pages_of(fields_F, query_RC, step)
        attend(items_W3, query_RC, group, pages, sequences, params, out_RC)

    @jit()
    def run(
        thread: int, num_threads: int, arrived: Ints, addresses_TB: Ints, num_rows: int,
        like: Numbers, plain_step: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Run a program. A thread has its own addresses of slots. `plain_step`: see FusedStep."""
        step, addresses_B = FusedStep(*plain_step), addresses_TB[thread]
        barrier = 1
        for op in range(step.fields_OF.shape[0]):
            fields_F, factors_X = step.fields_OF[op], step.factors_OX[op]
            code = fields_F[CODE]
            if fields_F[BARRIER]:
                barrier = barrier_wait(arrived, barrier, num_threads)
            if code <= _LAST_OF_ROWS:
                run_on_rows(fields_F, factors_X, addresses_B, like, step.like_scale, 0, num_rows)
                continue
            if code >= _FIRST_OF_MIXTURES:
                stages(fields_F, factors_X, addresses_B, num_rows, like, step, thread, num_threads)
                continue
            x_shape = (num_rows, fields_F[FIRST_WIDTH])
            x_RK = carray(pointer_to(addresses_B[fields_F[FIRST]], like), x_shape)
            out_shape = (num_rows, fields_F[OUT_WIDTH])
            out_RN = carray(pointer_to(addresses_B[fields_F[OUT]], like), out_shape)
            if code == PRODUCT:
                product(fields_F, x_RK, out_RN, thread, num_threads)
                continue
            if thread == 0:
                key_shape = (num_rows, fields_F[SECOND_WIDTH])
                key_RC = carray(pointer_to(addresses_B[fields_F[SECOND]], like), key_shape)
                value_shape = (num_rows, fields_F[THIRD_WIDTH])
                value_RC = carray(pointer_to(addresses_B[fields_F[THIRD]], like), value_shape)
                write(fields_F, key_RC, value_RC, step)
            barrier = barrier_wait(arrived, barrier, num_threads)
            read(fields_F, factors_X, x_RK, out_RN, step, thread, num_threads)

    return run


def access_to(keys_NKDO: Numbers) -> Access:
    """Return the access to a cache that holds numbers as they were written."""
    return PAIRS_ACCESS if uses_pairs(keys_NKDO) else EXACT_ACCESS


def runner_for(
    multiplying: Multiplying, access: Access, multiply_experts: Any = None, advance: Any = None
) -> Any:
    """Return the runner for an access to the cache and a model with one kind of product.

    `multiply_experts`: the product of all experts; None if the model has none. `advance`: the
    function of layers with states (`states/fused_step.py`); None if the model has none.
    """
    mixture = _nothing if multiply_experts is None else _mixture(multiply_experts)
    return _runner(multiplying, access, mixture, _nothing if advance is None else advance)
