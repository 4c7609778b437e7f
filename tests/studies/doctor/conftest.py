"""The process that imports torch for `doctor` runs once for all tests of this folder."""

from functools import cache

import pytest

from ropewalk.studies.doctor import command
from ropewalk.studies.doctor.packages import read_torch

_read_once = cache(read_torch)


@pytest.fixture(autouse=True)
def _torch_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "read_torch", _read_once)
