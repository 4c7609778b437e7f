"""Integers of eight bits with fixed scales: how keys and values become codes, and the scales.

Keys are cached before rotation, so both dimensions of a rotated pair can share one scale. It then
commutes with the rotation: a read multiplies the query by it, and no key. The scale of a value's
dimension multiplies the output. So a page is a page of another number type.

Scales come from the prompts of the self-check. A number beyond the range becomes the largest code.

Shapes: T = flat tokens, K = key heads, D = key dimensions, V = value dimensions, N = pages,
O = offsets in a page, H = query heads.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LARGEST = 127
# Standard deviations from the mean that codes reach. A short text shows its mean and deviation, but
# not the largest number of a long one. A multiple of the largest would waste codes on keys, whose
# means may be many deviations.
_REACH = 6.5
_LEAST, _MOST = 2.0**-30, 2.0**30  # of a scale, so that a query times a scale stays finite


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a layer, float32. A code times its scale is the number."""

    key_KD: Tensor
    value_KV: Tensor

    def of(self, device: torch.device) -> "Scales":
        """Return the scales on a device, contiguous as its kernels expect them."""
        return Scales(self.key_KD.to(device), self.value_KV.to(device))

    def codes(self, key_TKD: Tensor, value_TKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of keys and values, int8. That of NaN is 0."""
        return _codes(key_TKD, self.key_KD), _codes(value_TKV, self.value_KV)

    def scaled(self, query_THD: Tensor) -> Tensor:
        """Return float32 queries whose products with codes are those with keys."""
        num_tokens, _, dim = query_THD.shape
        query_TKGD = query_THD.float().view(num_tokens, len(self.key_KD), -1, dim)
        return (query_TKGD * self.key_KD[:, None]).view(query_THD.shape)

    def unscaled(self, out_THV: Tensor) -> Tensor:
        """Return the float32 output of values from that of their codes."""
        num_tokens, _, dim = out_THV.shape
        out_TKGV = out_THV.float().view(num_tokens, len(self.value_KV), -1, dim)
        return (out_TKGV * self.value_KV[:, None]).view(out_THV.shape)


class CodeArrays(NamedTuple):
    """The pages of a layer as numpy arrays, and the scales of its codes."""

    keys_NKDO: Any
    values_NKOV: Any
    scales: Scales


def _codes(numbers: Tensor, scale: Tensor) -> Tensor:
    codes = (numbers.float() / scale).round()
    return codes.clamp(-_LARGEST, _LARGEST).nan_to_num(0.0).to(torch.int8)


def scales_of(
    key_TKD: Tensor, value_TKV: Tensor, num_pairs: int, firsts: Sequence[int] = ()
) -> Scales:
    """Return the scales for the keys and values of prompts.

    The first pairs of dimensions are rotated. `firsts`: the first token of each prompt. Its numbers
    are often far from all others. The scales reach them, but no deviation counts them.
    """
    key_KD, value_KV = _scale(key_TKD, firsts), _scale(value_TKV, firsts)
    first_KP, second_KP = key_KD[:, :num_pairs], key_KD[:, num_pairs : 2 * num_pairs]
    pair_KP = torch.maximum(first_KP, second_KP)
    return Scales(torch.cat((pair_KP, pair_KP, key_KD[:, 2 * num_pairs :]), 1), value_KV)


def _scale(numbers_TKX: Tensor, firsts: Sequence[int]) -> Tensor:
    """Return the scale that reaches the largest number, and `_REACH` deviations from the mean."""
    numbers_TKX = numbers_TKX.float().cpu()
    is_later_T = torch.ones(len(numbers_TKX), dtype=torch.bool)
    is_later_T[list(firsts)] = False
    deviation_KX, mean_KX = torch.std_mean(numbers_TKX[is_later_T], 0)
    reach_KX = mean_KX.abs() + _REACH * deviation_KX
    scale_KX = torch.maximum(reach_KX, numbers_TKX.abs().amax(0)) / _LARGEST
    return scale_KX.clamp(_LEAST, _MOST)


def digest_of(scales: Mapping[int, Scales]) -> str:
    """Return a hash of the scales of all layers."""
    found = hashlib.sha256()
    for index in sorted(scales):
        for each in (scales[index].key_KD, scales[index].value_KV):
            found.update(each.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
