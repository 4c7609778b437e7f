"""Reads of these tests always pay and have time, because pages are tiny and the machine busy."""

import pytest

from ropewalk.model_runtime.engine.kv_disk import lower_store, reader


@pytest.fixture(autouse=True)
def _reads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_store.LowerStore, "_pays", lambda *_: True)
    monkeypatch.setattr(lower_store, "_LEAST_S", 1000.0)
    monkeypatch.setattr(reader, "_PAGE_S", 1000.0)
