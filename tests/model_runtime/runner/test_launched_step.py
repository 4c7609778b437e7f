"""The memory on the host that a device copies its tokens to."""

from typing import Any

import pytest
import torch

from ropewalk.model_runtime.runner.launched_step import HostBuffers


def test_host_buffers_are_used_in_turn_and_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unread steps never share memory, also when a step has more tokens than before."""
    made: list[int] = []
    empty = torch.empty

    def pageable(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Any:
        assert pin_memory  # which a machine without a GPU cannot give
        tensor = empty(size, dtype=dtype)
        made.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch, "empty", pageable)
    buffers = HostBuffers()
    taken = [buffers.take(num, torch.int64) for num in (2, 512, 6, 1, 513, 512, 4, 1000)]
    assert [len(each) for each in taken] == [2, 512, 6, 1, 513, 512, 4, 1000]
    places = [each.data_ptr() for each in taken]
    for first in range(len(places) - 2):
        assert len(set(places[first : first + 3])) == 3
    assert (places[3], places[5], places[7]) == (places[0], places[2], places[4])
    assert len(made) == 4
    assert {each.data_ptr() for grown in buffers._buffers for each in grown} == set(made)
