"""A replacement is kept only if its output agrees with the module's on trial inputs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.probing.equivalence import (
    IsEqual,
    equal_by_row,
    equal_by_scale,
    first_equivalent,
    trial_rows,
)

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TRIAL_RD = trial_rows(8, (0.1, 1.0, 30.0))


class Computing(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self._function(x)


def double(x: Tensor) -> Tensor:
    """Multiply by two."""
    return 2 * x


def with_nan(x: Tensor) -> Tensor:
    """Multiply by two, but lose one value."""
    out = 2 * x
    out[1, 3] = torch.nan
    return out


def failing(x: Tensor) -> Tensor:
    """Fail, like a module that takes other inputs."""
    raise IndexError(x.shape)


def chosen(
    original: Callable[[Tensor], Tensor],
    *functions: Callable[[Tensor], Tensor],
    is_equal: IsEqual | None = None,
) -> int | None:
    """The index of the function that replaces the original, or None."""
    candidates = [Computing(each) for each in functions]
    equality = is_equal or equal_by_row(ROUNDING)
    return first_equivalent(
        Computing(original), lambda: [(each, equality) for each in candidates], TRIAL_RD
    )


def test_the_first_that_agrees_is_taken() -> None:
    """Later candidates are not even created."""
    assert chosen(double, torch.neg, lambda x: x + x, double) == 1

    def candidates() -> Iterator[tuple[nn.Module, IsEqual]]:
        yield Computing(double), equal_by_row(ROUNDING)
        raise AssertionError("a candidate after the first equal one is tried")

    assert first_equivalent(Computing(double), candidates, TRIAL_RD) == 0


@pytest.mark.parametrize(
    "other",
    [
        torch.neg,
        lambda x: 2.001 * x,
        lambda x: 2 * x.clamp(max=20.0),
        lambda x: double(x)[None],
        lambda x: double(x)[:, :1],
        lambda x: double(x).double(),
        lambda x: double(x).bfloat16(),
        with_nan,
    ],
    ids=["sign", "factor", "clip", "dimension", "broadcast", "wide", "narrow", "NaN"],
)
@pytest.mark.parametrize(
    "is_equal", [equal_by_row(ROUNDING), equal_by_scale(ROUNDING, torch.ones(8))]
)
def test_without_agreement_the_module_stays(
    other: Callable[[Tensor], Tensor], is_equal: IsEqual
) -> None:
    """Values, shape and number type are compared."""
    assert chosen(double, other, is_equal=is_equal) is None
    assert chosen(double, double, is_equal=is_equal) == 0


def test_no_candidate_is_none() -> None:
    """There may be no candidate for a device."""
    assert chosen(double) is None


def test_a_module_that_fails_is_another_kind() -> None:
    """A module that returns several tensors is another kind, too."""
    assert chosen(failing, double, failing) is None
    assert chosen(lambda x: (x, x), double) is None  # type: ignore[arg-type, return-value]


def test_an_error_of_a_candidate_is_raised() -> None:
    """A fault of our own kernels must not look like another architecture."""
    with pytest.raises(IndexError):
        chosen(double, failing)


@pytest.mark.parametrize(
    "is_equal", [equal_by_row(ROUNDING), equal_by_scale(ROUNDING, torch.ones(8))]
)
def test_nan_equals_nothing(is_equal: IsEqual) -> None:
    """If module and candidate both return NaN, nothing is known about the formula."""
    assert chosen(with_nan, with_nan, is_equal=is_equal) is None


def test_small_rows_are_judged_by_their_own_norm() -> None:
    """A large row does not hide the error of a small one."""

    def shifted(x: Tensor) -> Tensor:
        return torch.cat((2.1 * x[:1], 2 * x[1:]))

    assert chosen(double, shifted) is None


def test_a_small_scale_does_not_hide_another_formula() -> None:
    """The outputs are divided by the scale; a scale of zero shows nothing."""
    scale_D = torch.full((8,), 1e-4)

    def scaled(x: Tensor) -> Tensor:
        return x * scale_D

    def shifted(x: Tensor) -> Tensor:
        return (x + 0.1) * scale_D

    assert chosen(scaled, shifted, is_equal=equal_by_scale(ROUNDING, torch.ones(8))) == 0
    assert chosen(scaled, shifted, scaled, is_equal=equal_by_scale(ROUNDING, scale_D)) == 1
    zeros = equal_by_scale(ROUNDING, torch.zeros(8))
    assert chosen(torch.zeros_like, torch.zeros_like, is_equal=zeros) is None


def test_the_tolerance_is_that_of_the_number_type() -> None:
    """Rounding that bfloat16 makes is a difference in float32."""
    near = Computing(lambda x: (2 * x.float() * 1.004).to(x.dtype))
    equality = equal_by_row(ROUNDING)
    rows_RD = TRIAL_RD.bfloat16()
    assert first_equivalent(Computing(double), lambda: [(near, equality)], TRIAL_RD) is None
    assert first_equivalent(Computing(double), lambda: [(near, equality)], rows_RD) == 0


def test_weights_of_zero_do_not_decide() -> None:
    """A linear of zeros has the outputs of any other that is followed by zeros."""
    linear = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(linear.weight)
    equality = equal_by_row(ROUNDING)

    def scaled(x: Tensor) -> Tensor:
        return 2 * linear(x)

    assert torch.equal(scaled(TRIAL_RD), linear(TRIAL_RD))
    found = first_equivalent(linear, lambda: [(scaled, equality), (linear, equality)], TRIAL_RD)
    assert found == 1
    assert not linear.weight.any(), "the weights are as they were"


def test_trial_rows_are_always_the_same() -> None:
    """A load decides the same in every process."""
    again_RD = trial_rows(8, (0.1, 1.0, 30.0), shift=0.5)
    assert torch.equal(TRIAL_RD, trial_rows(8, (0.1, 1.0, 30.0)))
    difference_RD = (again_RD - TRIAL_RD) / torch.tensor([0.1, 1.0, 30.0])[:, None]
    torch.testing.assert_close(difference_RD, torch.full((3, 8), 0.5))
