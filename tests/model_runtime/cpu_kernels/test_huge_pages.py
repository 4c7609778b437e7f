"""Weights lie in memory that may have huge pages, and are given back."""

import mmap
import re
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from ropewalk.model_runtime.cpu_kernels.huge_pages import Bytes, HugePages
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import INT8
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import PanelWriter

_MIB = 1 << 20


def is_advised(address: int) -> bool:
    """Return whether the kernel was asked for huge pages at an address."""
    at = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in found.groups())
            at = begin <= address < end
        elif at and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


def test_pieces_are_zeros_apart_from_each_other() -> None:
    pages = HugePages()
    pieces = [pages.zeros(size) for size in (1, 64, 65, 20 * _MIB, 20 * _MIB, 100 * _MIB, 7, 0)]
    for number, piece in enumerate(pieces):
        assert not piece.any()
        assert piece.ctypes.data % 64 == 0
        piece[:] = number + 1
    for number, piece in enumerate(pieces):
        assert (piece == number + 1).all()


def test_a_mapping_ends_with_its_last_piece() -> None:
    pages = HugePages()
    first, second = pages.zeros(100), pages.zeros(100)
    mapping: weakref.ref[Bytes] = weakref.ref(first.base)  # type: ignore[arg-type]
    del first
    assert mapping() is not None
    assert second.base is mapping()
    del second
    assert mapping() is None
    assert not pages.zeros(100).any()


def test_the_largest_rest_is_used() -> None:
    """A large piece takes a mapping of its own, and leaves what a smaller one can use."""
    pages = HugePages()
    first = pages.zeros(1)
    large = pages.zeros(40 * _MIB)
    small = pages.zeros(1)
    assert small.base is first.base
    assert large.base is not first.base


def test_memory_that_cannot_be_had_is_an_error_with_its_size() -> None:
    with pytest.raises(MemoryError, match=r"\d{19} bytes cannot be mapped"):
        HugePages().zeros(1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has huge pages")
def test_weights_of_few_bits_ask_for_huge_pages() -> None:
    memory = PanelWriter(INT8, 64, 4096).panels.memory
    assert is_advised(memory.ctypes.data)
    # A mapping of its own, because numpy asks for huge pages in parts of the heap, too.
    plain = mmap.mmap(-1, _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert not is_advised(np.frombuffer(plain, np.uint8).ctypes.data)
