"""The products and the attention that a processor gets, remembered from an earlier trial.

Trials need torch and numba, which take seconds to import.
"""

from typing import TYPE_CHECKING, NamedTuple

from ropewalk.model_runtime.known_trials import remembered
from ropewalk.model_runtime.loading.plain_config import PlainDevice, PlainNumberType

if TYPE_CHECKING:
    import torch


class Words(NamedTuple):
    """The banner's words for what computes."""

    products: str
    attention: str
    low_bits: str  # the type of the numbers in which weights of few bits are multiplied


def expected_computing(
    device: "torch.device | PlainDevice", dtype: "torch.dtype | PlainNumberType"
) -> Words:
    """Return the banner's words before weights are loaded."""
    if not isinstance(device, PlainDevice):
        return _tried(device, str(dtype).removeprefix("torch."))
    name = str(dtype)
    return Words(*remembered(name, lambda: _tried_here(name), _are_words))


def _are_words(known: object) -> bool:
    return isinstance(known, list) and [type(each) for each in known] == [str] * len(Words._fields)


def _tried_here(name: str) -> Words:
    import torch  # noqa: PLC0415  # only for the first trial

    return _tried(torch.device("cpu"), name)


def _tried(device: "torch.device", name: str) -> Words:
    import torch  # noqa: PLC0415

    from ropewalk.model_runtime.loading.pack_model import expected_products  # noqa: PLC0415
    from ropewalk.model_runtime.runner.backends import described  # noqa: PLC0415

    dtype = getattr(torch, name)
    products, low_bits = expected_products(device, dtype)
    return Words(products, described(device), low_bits)
