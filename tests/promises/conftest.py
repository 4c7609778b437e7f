"""Fixtures of several promises."""

import pytest

from tests.fixed_costs import fix_step_costs
from tests.oracles.draft_adversary import Adversary, use_adversary
from tests.oracles.quantised_reads import use_small_groups


@pytest.fixture
def _fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that do not follow the clock."""
    fix_step_costs(monkeypatch)


@pytest.fixture
def adversary(_fixed_costs: None, monkeypatch: pytest.MonkeyPatch) -> type[Adversary]:
    """An adversary in the place of the drafter."""
    return use_adversary(monkeypatch)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of tiny models have two groups where large ones have more."""
    use_small_groups(monkeypatch)
