"""Snapshots find nearly what pages find, as the table of docs/hybrid.md says."""

import pytest

from benchmarks.state_snapshots import LOADS, measured

pytestmark = pytest.mark.costly(by="file")


@pytest.mark.parametrize("load", LOADS)
def test_many_slots_find_what_pages_find(load: str) -> None:
    """Without states, any page boundary is found; snapshots are at few of them."""
    plain, found = measured(load, 0), measured(load, 128)
    assert found.num_prompt_tokens == plain.num_prompt_tokens
    assert plain.cached_share > 0.8
    assert plain.cached_share - 0.02 < found.cached_share <= plain.cached_share
    assert found.most_slots <= 128


def test_an_engine_finds_what_its_scheduler_plans() -> None:
    """The steps of a real model, whose states are in the slots."""
    served, planned = (
        measured("shared prefix", 32, is_engine=is_engine) for is_engine in (True, False)
    )
    assert (served.num_prompt_tokens, served.num_cached) == (
        planned.num_prompt_tokens,
        planned.num_cached,
    )
