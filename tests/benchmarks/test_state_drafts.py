"""The measurement of drafts runs, compares answers, and has right tokens where it says so."""

import pytest

from benchmarks.state_drafts import SCENARIOS, model_of, table
from tests.fixed_costs import fix_step_costs

pytestmark = pytest.mark.costly(by="file")


def test_a_tiny_model_has_a_row_for_each_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted tokens are right but for one in eight; equal answers are required on the way."""
    fix_step_costs(monkeypatch)
    checkpoint = model_of(
        4, vocab_size=512, hidden_size=64, intermediate_size=96, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=2,
    )  # fmt: skip
    rows = table(checkpoint, 1).splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(SCENARIOS)
    accepted, drafted = map(int, rows[0].split(" | ")[-1].strip(" |").split(" of "))
    assert 10 < accepted < drafted
