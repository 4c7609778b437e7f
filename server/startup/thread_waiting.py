"""The time OpenMP threads wait for each other before they sleep; set before torch is imported."""

import os
from collections.abc import MutableMapping

# Rounds of an empty loop. libgomp's default is 300,000, which takes some milliseconds. If a thread
# has lost its core, a waiting thread then uses the core that the first one needs.
# libgomp uses 1,000 if threads outnumber cores. That outlasts the gap between two products.
# Measured on two cores with two threads and other work beside them, 36 products of one row:
# 846 ms with 300,000 rounds, 139 with 10,000, 35 to 52 with 1,000, 24 to 52 with none
# (OMP_WAIT_POLICY=passive). Binding threads to cores (OMP_PROC_BIND) helped 300,000 rounds a
# little, and made 1,000 and none 3 times slower.
_SPINS = "1000"
_ALREADY_SAID = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make waiting threads sleep soon, unless the environment sets how they wait."""
    if not any(name in environment for name in _ALREADY_SAID):
        environment["GOMP_SPINCOUNT"] = _SPINS
