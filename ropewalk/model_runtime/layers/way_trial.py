"""Trials at load that find which ways to multiply work on this processor, and which is fastest.

No way is chosen by a processor's name. Times decide only if two ways both work and one is clearly
faster, because the ways differ in the last bits. A product is compared with itself in other
batches, not with another module, so `equivalence.py` does not fit.
"""

import math
from functools import cache, partial

import torch
from torch import nn

from ropewalk.model_runtime.cpu_kernels.trials import CLEARLY, shortest
from ropewalk.model_runtime.known_trials import remembered
from ropewalk.model_runtime.layers import onednn
from ropewalk.model_runtime.layers.packed_product import (
    LARGE_SIZES,
    SMALL_SIZES,
    PackedProduct,
    Way,
    Workshop,
)

_PROBE = (448, 1536)  # outputs and inputs of the weight by which a way is chosen
_PROBE_ROWS = (1, 8, 256)  # rows of the timed products that decide between two ways


def is_possible(way: Way, dtype: torch.dtype) -> bool:
    """Return whether products with a small weight can be computed that way here."""
    return _probe(way, dtype) is not None


@cache
def choose_way(dtype: torch.dtype) -> Way:
    """Find the way in which weights of a dtype are laid out on this processor.

    Everything runs on one thread, because on a busy machine several wait for each other at random.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _chosen(dtype)
    finally:
        torch.set_num_threads(num_threads)


def _chosen(dtype: torch.dtype) -> Way:
    native = _probe(Way.ONEDNN, dtype)
    if dtype == torch.float32:  # an unknown order of sums does not ensure equal bits of rows
        return Way.OWN if native is None or native.skinny(1) is None else Way.ONEDNN
    stored = _probe(Way.STORED, dtype)
    if stored is None or stored.way is not Way.STORED:
        return Way.OWN if native is None else Way.ONEDNN
    if native is None:
        return Way.STORED
    faster = remembered(
        f"stored {dtype} beside oneDNN",
        lambda: _faster(native, stored, dtype).name,
        lambda known: known in (Way.STORED.name, Way.ONEDNN.name),
    )
    return Way[faster]


def _faster(native: PackedProduct, stored: PackedProduct, dtype: torch.dtype) -> Way:
    """Return the way of two whose products are clearly faster."""
    ratios = []
    for count in _PROBE_ROWS:
        x_RK = torch.ones(count, native.in_features).to(dtype)
        native_s, stored_s = shortest(partial(native, x_RK), partial(stored, x_RK))
        ratios.append(native_s / stored_s)
    return Way.STORED if math.prod(ratios) ** (1 / len(ratios)) > CLEARLY else Way.ONEDNN


def _probe(way: Way, dtype: torch.dtype) -> PackedProduct | None:
    """Return a product laid out that way; None if its rows depend on the batch or it fails."""
    if way is not Way.OWN and not onednn.is_available():
        return None
    linear = nn.Linear(_PROBE[1], _PROBE[0], bias=False).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
    try:
        product = PackedProduct([linear.to(dtype)], Workshop(way))
        x_RK = torch.randn(LARGE_SIZES[0] + 1, _PROBE[1], generator=generator).to(dtype)
        whole_RN = product(x_RK)
        is_invariant = all(
            torch.equal(product(x_RK[:count]), whole_RN[:count])
            for count in (*SMALL_SIZES, LARGE_SIZES[0])
        )
    except (RuntimeError, NotImplementedError):  # no such operator, or this processor lacks it
        return None
    return product if is_invariant else None
