"""Reads of pages with codes of eight bits, and float64 over what the codes stand for."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from tests.oracles.attention_cases import Case, Laid

CPU = torch.device("cpu")


@dataclass
class Coded(Laid):
    """A case whose `expected` reads the codes; `exact` is the answer without them."""

    exact: Tensor = field(init=False)


def in_codes(case: Case, device: torch.device = CPU) -> tuple[Coded, LayerRead]:
    """A case with random scales, and its read. Codes that no token wrote are 0."""
    laid = Coded(case, device)
    laid.exact = laid.expected()
    scales = random_scales(case, laid.tables.num_pairs)
    keys, values = laid.read.keys_NKDO, laid.read.values_NKOV
    key_codes, value_codes = scales.codes(
        keys.permute(0, 3, 1, 2).flatten(0, 1).cpu(),
        values.transpose(1, 2).flatten(0, 1).cpu(),
    )
    pages, _, _, size = keys.shape
    coded_keys = torch.empty_like(keys, dtype=torch.int8)
    coded_keys.copy_(key_codes.view(pages, size, *key_codes.shape[1:]).permute(0, 2, 3, 1))
    coded_values = torch.empty_like(values, dtype=torch.int8)
    coded_values.copy_(value_codes.view(pages, size, *value_codes.shape[1:]).transpose(1, 2))
    for index, (key, value) in enumerate(zip(laid.keys, laid.values, strict=True)):
        codes: Any = scales.codes(key, value)
        laid.keys[index] = codes[0].double() * scales.key_KD
        laid.values[index] = codes[1].double() * scales.value_KV
    read = replace(
        laid.read, keys_NKDO=coded_keys, values_NKOV=coded_values, scales=scales.of(device)
    )
    return laid, read


def random_scales(case: Case, num_pairs: int) -> Scales:
    """Numbers from 1/16 to 1/4, so that no random number saturates."""
    key_KD, value_KV = (torch.rand(case.heads[1], dim) * 3 / 16 + 1 / 16 for dim in case.dims)
    key_KD[:, num_pairs : 2 * num_pairs] = key_KD[:, :num_pairs]
    return Scales(key_KD, value_KV)
