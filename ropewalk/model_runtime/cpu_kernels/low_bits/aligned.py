"""The panels of several weights with outputs one after the other: all are full but for the last.

A product writes 64 outputs of each panel beside each other. So if the outputs of a weight are no
multiple of 64, those of the next one move to other places. Outputs of one format move with their
bits. A panel that would hold several formats is widened to float32.

Shapes: N = outputs of all weights, K = inputs, L = 64 outputs of a panel, B = blocks of inputs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32, PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (
    LowBitPanels,
    PanelWriter,
    float_parts,
    widened,
)

Indices = NDArray[np.int64]


def are_aligned(all_num_outputs: Sequence[int]) -> bool:
    """Return whether weights with these numbers of outputs can stay in their panels."""
    return all(num_outputs % PANEL == 0 for num_outputs in all_num_outputs[:-1])


def aligned(weights: Sequence[LowBitPanels]) -> list[LowBitPanels]:
    """Return the panels of several weights; those that need not move are not copied."""
    if are_aligned([each.num_outputs for each in weights]):
        return list(weights)
    owners_N = np.repeat(np.arange(len(weights)), [each.num_outputs for each in weights])
    rows_N = np.concatenate([np.arange(each.num_outputs) for each in weights])
    found = []
    for first in range(0, len(rows_N), PANEL):
        owners, rows = owners_N[first : first + PANEL], rows_N[first : first + PANEL]
        only = weights[owners[0]]
        if len(set(owners)) == 1 and rows[0] % PANEL == 0:
            memory = _panel(only, rows[0] // PANEL)
            found.append(LowBitPanels(only.kind, len(rows), only.num_inputs, memory))
        elif len({weights[owner].kind for owner in owners}) == 1:
            found.append(_moved(weights, owners, rows))
        else:
            found.append(_as_floats(weights, owners, rows))
    return found


def _panel(weight: LowBitPanels, panel: int) -> NDArray[np.uint8]:
    return weight.memory[panel * weight.panel_bytes : (panel + 1) * weight.panel_bytes]


def _moved(weights: Sequence[LowBitPanels], owners: Indices, rows: Indices) -> LowBitPanels:
    """Return a panel with rows of one format from several places."""
    kind, num_inputs = weights[owners[0]].kind, weights[owners[0]].num_inputs
    made = PanelWriter(kind, len(rows), num_inputs).panels
    places = _places(kind)
    blocks = made.memory.reshape(-1, kind.block_bytes)
    for at, (owner, row) in enumerate(zip(owners, rows, strict=True)):
        source = _panel(weights[owner], row // PANEL).reshape(-1, kind.block_bytes)
        blocks[:, places[at]] = source[:, places[row % PANEL]]
    return made


def _places(kind: Format) -> Indices:
    """Return the places of each output's bytes in a block, [L, bytes]."""
    units = [kind.factor_bytes] * kind.num_factors
    for _ in range(kind.block // kind.group):
        units += [1] * (kind.scale_bytes // PANEL)
        units += [kind.upper_word_bytes] * bool(kind.upper_bits)
        units += [kind.unit_bytes] * (kind.group // kind.unit_inputs)
    begins = PANEL * np.cumsum([0, *units[:-1]])
    found = [
        begin + unit * np.arange(PANEL)[:, None] + np.arange(unit)
        for begin, unit in zip(begins, units, strict=True)
    ]
    return np.concatenate(found, axis=1)


def _as_floats(weights: Sequence[LowBitPanels], owners: Indices, rows: Indices) -> LowBitPanels:
    """Return a panel with rows of several formats."""
    parts = []
    for owner in dict.fromkeys(owners.tolist()):
        own = rows[owners == owner]
        first, end = own[0] // PANEL, own[-1] // PANEL + 1
        wide_NK = widened(weights[owner], torch.float32, first, end)
        parts.append(wide_NK[own - first * PANEL])
    writer = PanelWriter(FLOAT32, len(rows), weights[0].num_inputs)
    writer.write(0, float_parts(torch.cat(parts)))
    return writer.panels
