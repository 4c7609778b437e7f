"""Sizes as text."""

import pytest

from ropewalk.model_runtime.size_text import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (14 * 2**20, "14 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**30 - 1, "1 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_a_size_is_told_in_digits_of_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
