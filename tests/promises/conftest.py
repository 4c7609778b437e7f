"""Fixtures of several promises."""

from dataclasses import replace

import pytest

from ropewalk.model_runtime.attention.quantised.page_format import FORMATS
from tests.fixed_costs import fix_step_costs
from tests.oracles.draft_adversary import Adversary, use_adversary
from tests.oracles.quantised_reference import SMALL_GROUPS


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
    for kind, group in SMALL_GROUPS.items():
        monkeypatch.setitem(FORMATS, kind, replace(FORMATS[kind], group=group))
