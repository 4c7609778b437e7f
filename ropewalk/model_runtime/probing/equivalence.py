"""Trials of replacements: nothing is trusted by name.

Every architecture has its own classes for the same formulas. So a replacement is compared with the
module of the checkpoint on the same inputs, and is kept only if the outputs agree. Both compute
with random numbers instead of weights (random_numbers.py). Weights of zero would make every formula
agree, and gates that are small make silu and gelu alike.

Three comparisons of this server are not made here. `self_check.py` compares whole steps of the
engine, over a cache and to the bit. The trial in `packed_product.py` compares a library with our
own sums, and `way_trial.py` compares a product with itself. An error of these must be seen by the
caller, while an error of a module means here that it takes other inputs.

Shapes: R = rows, D = dimensions of a row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.probing.random_numbers import random_numbers

# Gets the output of a candidate and the output of the module; shape and number type are the same.
IsEqual = Callable[[Tensor, Tensor], bool]
Rounding = Mapping[torch.dtype, float]  # the largest relative difference, by number type


def trial_rows(num_dims: int, scales: Sequence[float], shift: float = 0.0) -> Tensor:
    """Return random float32 rows [R, D], one for each scale; they are the same in every call.

    `shift` is the mean of a row before it is scaled.
    """
    generator = torch.Generator().manual_seed(0)
    noise_RD = torch.randn(len(scales), num_dims, generator=generator) + shift
    return noise_RD * torch.tensor(scales)[:, None]


@torch.inference_mode()
def first_equivalent(
    module: nn.Module,
    candidates: Callable[[], Iterable[tuple[Callable[[Tensor], Tensor], IsEqual]]],
    trial: Tensor,
) -> int | None:
    """Return the place of the first candidate with the module's outputs; None if there is none.

    `candidates` makes them from the module's random numbers, so that the caller makes the chosen
    one anew from the weights. A module that raises an error for the trial's input is of another
    kind, so the result is None. An error of a candidate is raised, because candidates are our own.
    """
    with random_numbers(module):
        try:
            expected = module(trial)
        except Exception:  # noqa: BLE001  # code of a checkpoint raises any type
            return None
        if not isinstance(expected, Tensor):
            return None
        for place, (candidate, is_equal) in enumerate(candidates()):
            output = candidate(trial)
            if (
                output.shape == expected.shape
                and output.dtype == expected.dtype
                and is_equal(output, expected)
            ):
                return place
    return None


def equal_by_row(rounding: Rounding) -> IsEqual:
    """Return a comparison relative to the norm of each row of the module's output."""

    def is_equal(output: Tensor, expected: Tensor) -> bool:
        apart = (output.float() - expected.float()).norm(dim=-1)
        # NaN is above any bound.
        return bool((apart <= rounding[expected.dtype] * expected.float().norm(dim=-1)).all())

    return is_equal


def equal_by_scale(rounding: Rounding, scale_D: Tensor) -> IsEqual:
    """Return a comparison of rows [R, D] after division by the scale of each dimension."""

    def is_equal(output_RD: Tensor, expected_RD: Tensor) -> bool:
        bound = rounding[expected_RD.dtype]
        output_RD, expected_RD = (each.float() / scale_D for each in (output_RD, expected_RD))
        return torch.allclose(output_RD, expected_RD, rtol=bound, atol=bound)

    return is_equal
