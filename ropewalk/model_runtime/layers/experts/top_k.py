"""Choose experts by one rule on every device: among equal scores, the lower number.

torch's own choice among equal scores follows from its algorithm.
"""

from typing import Any

import torch
from torch import Tensor

TOP_K = {torch.topk, torch.Tensor.topk}  # the functions of torch that `first_top_k` replaces


def first_top_k(
    input: Tensor,  # noqa: A002  # torch's name
    k: int,
    dim: int = -1,
    largest: bool = True,  # noqa: FBT001, FBT002
    sorted: bool = True,  # noqa: A002, FBT001, FBT002
) -> Any:
    """Return the k largest numbers and their places; among equal ones, the first places."""
    del sorted
    values, places = torch.sort(input, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), places.narrow(dim, 0, k)))
