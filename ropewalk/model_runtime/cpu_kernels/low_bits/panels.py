"""Weights of few bits in panels, and the quantisation of a float weight to int8.

Shapes: N = outputs, K = inputs, G = groups of inputs, B = blocks of inputs, P = panels,
O = outputs of a panel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels import huge_pages
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32, INT8, PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.widen import widener

Bytes = NDArray[np.uint8]
NO_BYTES: Bytes = np.empty(0, np.uint8)  # of panels that are only planned
_MOST = 127  # of int8, so that a weight and its negative are stored alike
MOST_MAGNITUDE = _MOST * float(np.finfo(np.float16).max)  # of a weight


class Parts(NamedTuple):
    """The numbers of a weight's rows, before they are in panels."""

    kind: Format
    q_NK: NDArray[Any]  # uint8, or int8 if the format has whole bytes; float32 in FLOAT32
    factors_NB: NDArray[Any]  # float16, or uint8 if they are powers
    minima_NB: NDArray[np.float16] | None = None
    scales_NG: NDArray[Any] | None = None  # uint8, or int8 in a format without minima
    group_minima_NG: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class LowBitPanels:
    """The panels of one weight."""

    kind: Format
    num_outputs: int
    num_inputs: int
    memory: Bytes  # of all panels, aligned to cache lines

    @property
    def panel_bytes(self) -> int:
        return self.num_inputs // self.kind.block * self.kind.block_bytes

    def table(self) -> NDArray[np.int64]:
        """Return the address and the format of each panel, [P, 2]."""
        num_panels = -(-self.num_outputs // PANEL)
        addresses = self.memory.ctypes.data + self.panel_bytes * np.arange(num_panels)
        return np.stack([addresses, np.full(num_panels, self.kind.number)], axis=1)


def int8_parts(weight_NK: Tensor) -> Parts:
    """Quantise rows to int8 with a scale for each group of 32 inputs.

    The scale is the largest magnitude divided by 127, rounded to float16. Numbers are divided by
    the rounded scale and rounded to the nearest even integer. A group with a weight beyond
    MOST_MAGNITUDE has a scale that is not finite.
    """
    rows_NG32 = weight_NK.float().reshape(len(weight_NK), -1, INT8.group)
    scale_NG = (rows_NG32.abs().amax(2) / _MOST).half()
    # A scale that is too small for float16 makes all of its weights zero.
    divisor_NG = torch.where(scale_NG == 0, torch.inf, scale_NG.float())
    q_NG32 = (rows_NG32 / divisor_NG[..., None]).round().clamp(-_MOST, _MOST).to(torch.int8)
    return Parts(INT8, q_NG32.flatten(1).numpy(), scale_NG.numpy())


def float_parts(weight_NK: Tensor) -> Parts:
    """Return rows as they are, in float32."""
    return Parts(FLOAT32, weight_NK.float().numpy(), np.empty((len(weight_NK), 0), np.float16))


def panel_memory(num_bytes: int) -> Bytes:
    """Return zeros that are aligned to cache lines; rows of padding stay zero."""
    return huge_pages.zeros(num_bytes)


class PanelWriter:
    """The panels of one weight, filled with rows in order."""

    def __init__(
        self, kind: Format, num_outputs: int, num_inputs: int, memory: Bytes | None = None
    ) -> None:
        """Allocate the panels, or take memory. `num_inputs` is a multiple of the format's block."""
        if memory is None:
            memory = panel_memory(kind.num_bytes(num_outputs, num_inputs))
        self.panels = LowBitPanels(kind, num_outputs, num_inputs, memory)

    def write(self, first: int, parts: Parts) -> None:
        """Write rows from `first` on; it is a multiple of 64."""
        for row in range(0, len(parts.q_NK), PANEL):
            at = (first + row) // PANEL * self.panels.panel_bytes
            panel = self.panels.memory[at : at + self.panels.panel_bytes]
            _fill(panel, _cut(parts, row))


def _cut(parts: Parts, row: int) -> Parts:
    """Return the rows of one panel, padded with zeros."""

    def cut(rows: Any) -> Any:
        if rows is None:
            return None
        found = rows[row : row + PANEL]
        return np.pad(found, ((0, PANEL - len(found)), (0, 0))) if len(found) < PANEL else found

    return Parts(parts.kind, *map(cut, parts[1:]))


def _fill(panel: Bytes, parts: Parts) -> None:
    """Write the rows of one panel to its memory."""
    kind = parts.kind
    blocks = panel.reshape(-1, kind.block_bytes)
    num_blocks = len(blocks)
    heads = (parts.factors_NB, parts.minima_NB)[: kind.num_factors]
    _put(blocks, 0, [_as_bytes(each.T) for each in heads if each is not None])
    groups = blocks[:, kind.head_bytes :].reshape(num_blocks, -1, kind.group_bytes)
    per_block = groups.shape[1]
    scales = [each for each in (parts.scales_NG, parts.group_minima_NG) if each is not None]
    if kind.scale_bits == 4:  # bits
        scales = [scales[0] | (scales[1] << 4)]
    found = [_as_bytes(each.T).reshape(num_blocks, per_block, PANEL) for each in scales]
    q = parts.q_NK.T.reshape(num_blocks, per_block, kind.group, PANEL)
    if kind.upper_bits:
        places = list(map(kind.upper_place, range(kind.group)))
        found.append(_words(q >> kind.lower_bits, places, kind.upper_word_bytes))
    if kind.lower_bits < 8:  # bits
        places = [kind.lower_bits * index for index in range(kind.unit_inputs)]
        found.append(_words(q & (2**kind.lower_bits - 1), places, kind.unit_bytes))
    else:
        found.append(_as_bytes(q))
    _put(groups, 0, [each.reshape(num_blocks, per_block, -1) for each in found])


def _as_bytes(numbers: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8)


def _put(memory: Bytes, at: int, parts: Sequence[Bytes]) -> None:
    """Write parts one after the other along the last axis."""
    for part in parts:
        memory[..., at : at + part.shape[-1]] = part
        at += part.shape[-1]


def _words(q: NDArray[Any], places: Sequence[int], num_bytes: int) -> Bytes:
    """Join numbers of few bits, [..., inputs, O], to the bytes of words.

    `places`: the first bit of each input of a word.
    """
    split = q.reshape(*q.shape[:-2], -1, len(places), PANEL).astype(np.uint32)
    shifts = np.array(places, np.uint32)[:, None]
    joined = np.bitwise_or.reduce(split << shifts, axis=-2)
    return _as_bytes(joined.astype(f"u{num_bytes}"))


def joined_table(panels: Sequence[LowBitPanels]) -> NDArray[np.int64]:
    """Return the table of several weights with outputs one after the other, [P, 2].

    All but the last have a multiple of 64 outputs.
    """
    assert all(each.num_outputs % PANEL == 0 for each in panels[:-1])
    return np.concatenate([each.table() for each in panels])


def widened(panels: LowBitPanels, dtype: torch.dtype, first: int = 0, end: int = -1) -> Tensor:
    """Return the weights of panels `first` to `end` - 1 as rows, [N, K]; all by default."""
    end = -(-panels.num_outputs // PANEL) if end < 0 else end
    widen = widener((panels.kind.number,))
    num_rows = min(end * PANEL, panels.num_outputs) - first * PANEL
    rows_NK = torch.empty(num_rows, panels.num_inputs, dtype=dtype)
    wide_KO = np.empty((panels.num_inputs, PANEL), np.float32)
    for panel, (address, number) in enumerate(panels.table()[first:end].tolist()):
        widen(number, address, 0, panels.num_inputs, wide_KO.reshape(-1))
        rows = rows_NK[panel * PANEL : (panel + 1) * PANEL]
        rows.copy_(torch.from_numpy(wide_KO.T[: len(rows)]))
    return rows_NK


def plain_product(panels: LowBitPanels, x: Tensor) -> Tensor:
    """Multiply rows by torch, [..., K] -> [..., N]; the weight is not rounded to their type.

    One panel at a time is widened, and stays in the processor's cache.
    """
    widen = widener((panels.kind.number,))
    rows_RK, wide_KO = (
        x.reshape(-1, panels.num_inputs).float(),
        torch.empty(panels.num_inputs, PANEL),
    )
    parts = []
    for address, number in panels.table().tolist():
        widen(number, address, 0, panels.num_inputs, wide_KO.numpy().reshape(-1))
        parts.append(nn.functional.linear(rows_RK, wide_KO.t()))
    out_RN = torch.cat(parts, dim=-1)[:, : panels.num_outputs].to(x.dtype)
    return out_RN.view(*x.shape[:-1], panels.num_outputs)


def gathered(panels: LowBitPanels, ids: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
    """Return the rows of these outputs, [R, K], each widened from its panel. Raises IndexError."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < panels.num_outputs:
        raise IndexError(f"rows must be < {panels.num_outputs}. Given: {ids.max()}")
    widen = widener((panels.kind.number,))
    rows = np.empty((len(ids), panels.num_inputs), np.float32)
    wide_Q = np.empty(panels.num_inputs * PANEL, np.float32)
    begin, size, number = panels.memory.ctypes.data, panels.panel_bytes, panels.kind.number
    for row, at in enumerate(ids.tolist()):
        widen(number, begin + at // PANEL * size, 0, panels.num_inputs, wide_Q)
        rows[row] = wide_Q[at % PANEL :: PANEL]
    return torch.from_numpy(rows).to(dtype)
