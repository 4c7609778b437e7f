"""Fixtures of several promises."""

import pytest

from tests.fixed_costs import fix_step_costs
from tests.oracles.draft_adversary import Adversary, use_adversary


@pytest.fixture
def adversary(monkeypatch: pytest.MonkeyPatch) -> type[Adversary]:
    """An adversary in the place of the drafter, and drafts that do not follow the clock."""
    fix_step_costs(monkeypatch)
    return use_adversary(monkeypatch)
