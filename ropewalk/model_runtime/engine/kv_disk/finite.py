"""Checks that all numbers of a page are finite, so that no stored page can spread a NaN."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ropewalk.model_runtime.engine.kv_disk.buffers import Bytes

# The bits of an exponent; a number that has them all is an infinity or no number.
_EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}

IsFinite = Callable[[Bytes], bool]


class Records(NamedTuple):
    """Where the parameters of a layer's quantised pages are: float16 numbers of each record."""

    num_records: int  # of a page, one for each key head
    record_bytes: int
    first: int  # byte of a record
    end: int


def plain_check(dtype: str) -> IsFinite:
    """Return the check of pages that hold numbers of a type."""

    def is_finite(page: Bytes) -> bool:
        if dtype == "int8":  # each code is a number
            return True
        if dtype == "float32" and np.isfinite(np.add.reduce(page.view(np.float32))):
            return True  # a sum has no such number if no summand has; a finite sum may overflow
        bits = page.view(np.uint32) if dtype == "float32" else page.view(np.uint16)
        return _are_finite(bits, dtype)

    return is_finite


def quantised_check(layers: Sequence[Records]) -> IsFinite:
    """Return the check of quantised pages: a channel with such a number has such a parameter.

    Codes say nothing, because each of them is a number.
    """

    def is_finite(page: Bytes) -> bool:
        at = 0
        for each in layers:
            end = at + each.num_records * each.record_bytes
            records = page[at:end].reshape(each.num_records, each.record_bytes)
            parameters = np.ascontiguousarray(records[:, each.first : each.end])
            if not _are_finite(parameters.view(np.uint16), "float16"):
                return False
            at = end
        return True

    return is_finite


def _are_finite(bits: np.ndarray, dtype: str) -> bool:
    exponent = bits.dtype.type(_EXPONENTS[dtype])
    return not bool(np.any((bits & exponent) == exponent))
