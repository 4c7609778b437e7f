"""The convolutions of layers with states, and what kernels make of their weights."""

from typing import Any, Generic, TypeVar

from torch import Tensor, nn

Made = TypeVar("Made")


def is_causal(convolution: Any, num_channels: int, width: int) -> bool:
    """Return whether a module is a causal convolution of each channel, of whole widths."""
    if not isinstance(convolution, nn.Conv1d):
        return False
    num_taps, padding = convolution.kernel_size[0], convolution.padding
    return (
        convolution.in_channels == convolution.out_channels == convolution.groups == num_channels
        and padding == (num_taps - 1,)
        and num_taps > 1
        and num_channels % width == 0
    )


def taps_of(convolution: nn.Conv1d) -> Tensor:
    """Return the weights of a convolution of each channel, [taps, channels], as a float32 copy."""
    return convolution.weight.detach()[:, 0].float().t().contiguous()


class Kept(Generic[Made]):
    """Something made from some weights, until they are others.

    Probes put random numbers in the place of weights for a while.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._made: Made | None = None

    def of(self, weights: tuple[Tensor, ...]) -> Made | None:
        """Return what was made from these weights; None if there is nothing."""
        if len(weights) != len(self._tensors):
            return None
        pairs = zip(weights, self._tensors, strict=True)
        same = all(
            one.data_ptr() == other.data_ptr() and one.dtype == other.dtype for one, other in pairs
        )
        return self._made if same else None

    def keep(self, weights: tuple[Tensor, ...], made: Made) -> Made:
        """Keep what was made, with the weights, so that their memory is not used again."""
        self._tensors, self._made = tuple(each.data for each in weights), made
        return made
