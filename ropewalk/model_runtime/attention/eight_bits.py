"""Integers of eight bits with fixed scales: how keys and values become codes, and the scales.

Keys are cached before rotation, so both dimensions of a rotated pair can share one scale. It then
commutes with the rotation: a read multiplies the query by it, and no key. The scale of a value's
dimension multiplies the output. So a page is a page of another number type.

A scale is a power of two, so multiplying by it rounds nothing. It comes from the prompts of the
self-check. A number beyond the range becomes the largest code.

Shapes: T = flat tokens, K = key heads, D = key dimensions, V = value dimensions, N = pages,
O = offsets in a page, H = query heads.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LARGEST = 127
# The self-check's largest code is from 32 up to 64. A later number may be twice as large or more.
_PEAK_BITS = 6
_MOST_BITS = 30  # of a scale's exponent, so that a query times a scale stays finite


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


def scales_of(keys_NKDO: Tensor, values_NKOV: Tensor, num_pairs: int) -> Scales:
    """Return the scales for what these pages hold. The first pairs of dimensions are rotated."""
    key_KD = keys_NKDO.float().abs().amax((0, 3)).cpu()
    first_KP, second_KP = key_KD[:, :num_pairs], key_KD[:, num_pairs : 2 * num_pairs]
    pair_KP = torch.maximum(first_KP, second_KP)
    key_KD = torch.cat((pair_KP, pair_KP, key_KD[:, 2 * num_pairs :]), 1)
    return Scales(_power(key_KD), _power(values_NKOV.float().abs().amax((0, 2)).cpu()))


def _power(peak: Tensor) -> Tensor:
    """Return the power of two that brings a peak to [32, 64); 2^-6 for a peak of zero."""
    exponent = torch.frexp(peak.nan_to_num(0.0)).exponent - _PEAK_BITS
    return torch.ldexp(torch.ones_like(peak), exponent.clamp(-_MOST_BITS, _MOST_BITS))


def digest_of(scales: Mapping[int, Scales]) -> str:
    """Return a hash of the scales of all layers."""
    found = hashlib.sha256()
    for index in sorted(scales):
        for each in (scales[index].key_KD, scales[index].value_KV):
            found.update(each.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
