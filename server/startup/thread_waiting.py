"""How long OpenMP's threads wait for each other before they sleep; set before torch is imported."""

import os
from collections.abc import MutableMapping

# Rounds of an empty loop. libgomp's own choice is 300,000, some milliseconds: a thread that waits
# for one that has lost its core burns the core that the other needs. 1,000, what libgomp takes
# where threads outnumber cores, outlasts the gap between two products. Measured on two cores, two
# threads, other work beside them: 36 products of one row took 846 ms with 300,000 rounds, 139 with
# 10,000, 35 to 52 with 1,000, 24 to 52 with none (OMP_WAIT_POLICY=passive). Binding threads to
# cores (OMP_PROC_BIND) helped 300,000 rounds a little, and made 1,000 and none 3 times slower.
_SPINS = "1000"
_ALREADY_SAID = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting threads sleep soon, unless the environment says how they wait."""
    if not any(name in environment for name in _ALREADY_SAID):
        environment["GOMP_SPINCOUNT"] = _SPINS
