"""The simulated replicas serve every request, and the choice by prefix is the better one."""

from benchmarks.replica_choice import MACHINES, Simulation, simulated
from ropewalk.server.replicas.choice import DECODE_WEIGHT, ReplicaChoice


def test_every_request_ends_and_takes_its_load_back() -> None:
    """An answer comes after its first token."""
    choice = ReplicaChoice()
    simulation = Simulation(MACHINES[0], choice, 300, seed=1)
    result = simulation.run(60)
    assert len(simulation.first) == len(simulation.whole) == 60
    assert choice.num_open == 0
    assert 0 < result.first_token_s < result.whole_s
    assert 0 < result.cached_share < 1


def test_prefixes_are_worth_more_than_even_loads() -> None:
    """The default weight is no worse than its neighbours."""
    machine = MACHINES[1]
    by_prefix = simulated(machine, "prefix", DECODE_WEIGHT, 300, 400)
    for routing in ("least_loaded", "round_robin"):
        other = simulated(machine, routing, 0, 300, 400)  # type: ignore[arg-type]
        assert by_prefix.whole_s < 0.8 * other.whole_s
        assert by_prefix.cached_share > other.cached_share + 0.2
    for weight in (8, 128):
        assert by_prefix.whole_s < 1.1 * simulated(machine, "prefix", weight, 300, 400).whole_s
