"""The tokens that may come, as one bit for each.

A route makes the bits, and the sampler and grammars read them.
"""

from collections.abc import Sequence

import numpy as np


def token_mask(token_ids: Sequence[int]) -> bytes:
    """Return bits that are set for these tokens, the lowest token first."""
    is_set_V = np.zeros(max(token_ids) + 1, dtype=np.bool_)
    is_set_V[list(token_ids)] = True
    return np.packbits(is_set_V, bitorder="little").tobytes()
