"""The layers of a decode step in one compiled call, for fused_decoder.py.

A step of few rows reads every weight once and computes little. If each norm, product and read is a
call of its own, the code between the calls takes as long as the calls. The reason is that a product
evicts the caches, so the code of every call is fetched again. Here nothing runs between them.

The functions are the ones that are otherwise called one by one, in the same order, so the bits are
the same. The threads split the outputs of each product and the heads of each read. The first thread
normalizes the heads and writes to the cache. Every thread adds and normalizes all rows for itself,
because that takes less time than a barrier.

Shapes: L = layers, W = fields of a layer's weights, R = rows, E = dimensions of the hidden state,
C = columns that hold head beside head, G = both halves of a gated block, I = one of them,
K = inputs and N = outputs of a product, Q = elements of packed memory.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.attention import attend, attend_in_pairs, write_kv
from ropewalk.model_runtime.cpu_kernels.attention_dot import uses_pairs
from ropewalk.model_runtime.cpu_kernels.elementwise import add_and_normalize, gate, normalize_heads
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.kernel_arguments import (
    Destinations,
    Floats,
    FusedStep,
    Heads,
    Ints,
    LayerOutputs,
    Numbers,
    PageArrays,
)
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL, Multiplying, RowProducts
from ropewalk.model_runtime.cpu_kernels.threads import barrier_wait

_NUM_PRODUCTS = 4  # of a layer: queries, keys and values; output; gate and up; down
_PRODUCT_FIELDS = 6
_NORMS = _NUM_PRODUCTS * _PRODUCT_FIELDS  # then: after attention, after the block, queries, keys
_NUM_FIELDS = _NORMS + 4


def _product_fields(product: RowProducts) -> list[int]:
    """Return the fields of one product, as the kernel reads them."""
    return [
        product.packed_Q.ctypes.data,
        product.packed_Q.size,
        product.bias_N.ctypes.data,
        product.bias_N.size,
        product.layout,
        product.chain,
    ]


def layer_fields(products: Sequence[RowProducts], scales_D: Sequence[Floats]) -> list[int]:
    """Return a layer's fields: four products, then 2 norms, or 4 with the heads' norms."""
    fields = [field for product in products for field in _product_fields(product)]
    fields += [scale_D.ctypes.data for scale_D in scales_D]
    return fields + [0] * (_NUM_FIELDS - len(fields))


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typingctx: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Convert an address to a pointer to elements of the array `like`."""
    kind = types.CPointer(like.dtype)

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(kind))

    return kind(address, like), code


@cache
def _runner(multiplying: Multiplying, attend: Any) -> Any:
    """Compiled: a step's layers, by one way to multiply and one to read."""
    _, _, rows_for, multiply = multiplying

    @jit()
    def product(
        x_RK: Numbers,
        fields_W: Ints,
        index: np.int64,
        out_RN: Numbers,
        thread: int,
        num_threads: int,
    ) -> None:
        """Compute a thread's part of one of a layer's products.

        `index` is no literal, because numba would compile this again for each literal.
        """
        at = index * _PRODUCT_FIELDS
        packed_Q = carray(_pointer(fields_W[at], x_RK), fields_W[at + 1])
        bias_N = carray(_pointer(fields_W[at + 2], x_RK), fields_W[at + 3])
        layout, chain = fields_W[at + 4], fields_W[at + 5]
        num_panels = (out_RN.shape[1] + PANEL - 1) // PANEL
        begin = num_panels * thread // num_threads
        end = num_panels * (thread + 1) // num_threads
        multiply(rows_for(x_RK), packed_Q, bias_N, out_RN, layout, chain, begin, end)

    @jit()
    def run(
        thread: int, num_threads: int, arrived: Ints, hidden_RE: Numbers, normal_RE: Numbers,
        items_W3: Ints, plain_step: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Run all layers in place on the hidden state, and leave its norm for the next product.

        Each thread has its own hidden state, norm and work items. `plain_step`: see FusedStep.
        """
        step = FusedStep(*plain_step)
        heads = Heads(*step.heads)
        outputs, pages = LayerOutputs(*step.outputs), PageArrays(*step.pages)
        joined_RC, attended_RC = outputs.joined_RC, outputs.attended_RC
        output_RE, both_RG = outputs.output_RE, outputs.both_RG
        destinations = Destinations(*step.destinations)
        page_T, offset_T = destinations.page_T, destinations.offset_T
        sequences, params, eps = step.sequences, step.params, step.eps
        like_scale = step.like_scale
        keys_shape, values_shape = pages.keys_NKDO.shape, pages.values_NKOV.shape
        group = heads.num_query_heads // heads.num_key_heads
        key_at = heads.num_query_heads * heads.dim
        value_at = key_at + heads.num_key_heads * heads.dim
        num_rows, width = hidden_RE.shape
        between_RI = np.empty((num_rows, both_RG.shape[1] // 2), hidden_RE.dtype)
        barrier = 1
        for layer in range(step.fields_LW.shape[0]):
            fields_W = step.fields_LW[layer]
            scales = fields_W[_NORMS:]
            keys_NKDO = carray(_pointer(step.addresses_L2[layer, 0], hidden_RE), keys_shape)
            values_NKOV = carray(_pointer(step.addresses_L2[layer, 1], hidden_RE), values_shape)
            product(normal_RE, fields_W, np.int64(0), joined_RC, thread, num_threads)
            barrier = barrier_wait(arrived, barrier, num_threads)
            if thread == 0:
                if heads.are_normalized:
                    query_D = carray(_pointer(scales[2], like_scale), heads.dim)
                    key_D = carray(_pointer(scales[3], like_scale), heads.dim)
                    normalize_heads(joined_RC, 0, heads.num_query_heads, query_D, eps)
                    normalize_heads(joined_RC, key_at, heads.num_key_heads, key_D, eps)
                write_kv(
                    joined_RC, key_at, joined_RC, value_at, page_T, offset_T, keys_NKDO, values_NKOV
                )
            barrier = barrier_wait(arrived, barrier, num_threads)
            attend(
                items_W3, joined_RC, group, keys_NKDO, values_NKOV, sequences, params, attended_RC
            )
            barrier = barrier_wait(arrived, barrier, num_threads)
            product(attended_RC, fields_W, np.int64(1), output_RE, thread, num_threads)
            barrier = barrier_wait(arrived, barrier, num_threads)
            scale_E = carray(_pointer(scales[0], like_scale), width)
            add_and_normalize(hidden_RE, output_RE, scale_E, eps, normal_RE)
            product(normal_RE, fields_W, np.int64(2), both_RG, thread, num_threads)
            barrier = barrier_wait(arrived, barrier, num_threads)
            gate(both_RG, between_RI, 0, num_rows)
            product(between_RI, fields_W, np.int64(3), output_RE, thread, num_threads)
            barrier = barrier_wait(arrived, barrier, num_threads)
            scale_E = carray(_pointer(scales[1], like_scale), width)
            add_and_normalize(hidden_RE, output_RE, scale_E, eps, normal_RE)

    return run


def runner_for(multiplying: Multiplying, keys_NKDO: Numbers) -> Any:
    """Return the runner for a cache's pages and a model with one kind of product."""
    return _runner(multiplying, attend_in_pairs if uses_pairs(keys_NKDO) else attend)
