"""Which way to multiply this processor bears, and which is fastest: found by trial at load.

No way is chosen by a processor's name. Times decide only where two ways both work, and only if one
is clearly faster, because the ways differ in the last bits.
"""

import math
import time
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import nn

from model_runtime import onednn
from model_runtime.lane_pairs import HAS_PAIR_PRODUCTS
from model_runtime.packed_product import (
    LARGE_SIZES,
    SMALL_SIZES,
    PackedProduct,
    Way,
    Workshop,
)
from model_runtime.row_products import (
    IN_PAIRS,
    MOST_ROWS,
    PANEL,
    WIDENED,
    Panels,
    RowProducts,
)

_PROBE = (448, 1536)  # outputs and inputs of the weight by which a way is chosen
_PROBE_ROWS = (1, 8, 256)  # whose times decide between two ways
_PAIR_TRIAL = 1024  # inputs of the panel by which pairs are timed: it stays in the second cache
_TIMES = 7  # of each trial, of which the shortest counts
_CLEARLY = 1.15  # times faster; less may be chance


@cache
def pairs_pay() -> bool:
    """Return whether this processor gains by multiplying bfloat16 in pairs.

    The instruction takes as long as a product of single numbers on some processors, and four times
    as long on others.
    """
    if not HAS_PAIR_PRODUCTS:
        return False
    x_RK = np.ones((MOST_ROWS, _PAIR_TRIAL), np.uint16)
    panels = Panels(np.ones(_PAIR_TRIAL * PANEL, np.uint16), _PAIR_TRIAL, PANEL, _PAIR_TRIAL, None)
    seconds = []
    for multiplying in (WIDENED, IN_PAIRS):
        products = RowProducts(panels, _PAIR_TRIAL, multiplying)
        seconds.append(_shortest(partial(products.multiply, x_RK)))
    return seconds[1] * _CLEARLY < seconds[0]


def is_possible(way: Way, dtype: torch.dtype) -> bool:
    """Return whether products with a small weight can be computed that way here."""
    return _probe(way, dtype) is not None


@cache
def choose_way(dtype: torch.dtype, num_threads: int) -> Way:  # noqa: ARG001  # what is found holds for it
    """Find how weights of a number type are laid out on this processor."""
    native = _probe(Way.ONEDNN, dtype)
    if dtype == torch.float32:  # if the order of sums is unknown, so is whether rows are alike
        return Way.OWN if native is None or native.few(1) is None else Way.ONEDNN
    stored = _probe(Way.STORED, dtype)
    if stored is None or stored.way is not Way.STORED:
        return Way.OWN if native is None else Way.ONEDNN
    if native is None:
        return Way.STORED
    ratios = [_seconds(native, count) / _seconds(stored, count) for count in _PROBE_ROWS]
    return Way.STORED if math.prod(ratios) ** (1 / len(ratios)) > _CLEARLY else Way.ONEDNN


def _probe(way: Way, dtype: torch.dtype) -> PackedProduct | None:
    """A product laid out that way, whose rows do not depend on the batch; None: there is none."""
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
    except (RuntimeError, NotImplementedError):  # no such operator, or not for this processor
        return None
    return product if is_invariant else None


def _seconds(product: PackedProduct, num_rows: int) -> float:
    """A product's time for so many rows."""
    x_RK = torch.ones(num_rows, product.in_features).to(torch.bfloat16)
    return _shortest(partial(product, x_RK))


def _shortest(work: Callable[[], object]) -> float:
    """The shortest of several times, in seconds; the first call may compile."""
    times = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
