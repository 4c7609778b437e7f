"""Reads of these tests always pay and have time, because pages are tiny and the machine busy."""

import pytest

from ropewalk.model_runtime.engine.kv_disk import reader, tier


@pytest.fixture(autouse=True)
def _reads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier.DiskTier, "_pays", lambda *_: True)
    monkeypatch.setattr(tier, "_LEAST_S", 1000.0)
    monkeypatch.setattr(reader, "_LEAST_PATIENCE_S", 1000.0)
    monkeypatch.setattr(reader, "_UNKNOWN_S", 1000.0)
