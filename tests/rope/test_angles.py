"""Angles by page start and offset, against float64."""

import pytest
import torch

from ropewalk.rope import Rotary, Unscaled
from ropewalk.rope.angles import Angles, offset_angles, page_start_angles, position_angles, rotate


@pytest.mark.parametrize(("page_size", "theta"), [(8, 1e4), (64, 5e5)])
def test_error_stays_near_rounding_up_to_four_million(page_size: int, theta: float) -> None:
    """The error is below 2e-6; plain float32 products are off by more than 1e-2 somewhere."""
    inv_freq = Unscaled().frequencies(Rotary(64, theta)).inv_freq_P
    last = 4 * 2**20
    positions = torch.cat(
        [torch.arange(2000), torch.randint(last, (4000,)), torch.arange(last - 500, last)]
    )
    starts = page_start_angles(inv_freq, last // page_size, page_size)
    angles = position_angles(starts, offset_angles(inv_freq, page_size), positions)

    exact = torch.outer(positions.double(), inv_freq.double())
    assert float((angles.cos - exact.cos()).abs().max()) < 2e-6
    assert float((angles.sin - exact.sin()).abs().max()) < 2e-6
    plain = torch.outer(positions.float(), inv_freq).cos()
    assert float((plain - exact.cos()).abs().max()) > 1e-2


def test_turning_back_by_the_page_start_leaves_the_offset() -> None:
    """R(m) q . R(n) k with n = start + offset needs R(offset) of the key only."""
    inv_freq = Unscaled().frequencies(Rotary(32, 1e4)).inv_freq_P
    starts, offsets = page_start_angles(inv_freq, 64, 16), offset_angles(inv_freq, 16)
    query, key = torch.randn(2, 1, 40)
    at = [position_angles(starts, offsets, torch.tensor([n])) for n in (900, 500)]
    expected = (rotate(query, at[0]) * rotate(key, at[1])).sum()

    page, offset = divmod(500, 16)
    back = Angles(starts.cos[page], -starts.sin[page])
    turned_key = rotate(key, Angles(offsets.cos[offset], offsets.sin[offset]))
    assert float((rotate(rotate(query, at[0]), back) * turned_key).sum()) == pytest.approx(
        float(expected), rel=1e-4, abs=1e-4
    )
