"""Weights as codes of few bits with scales, and their widening to numbers, on any device.

A weight is `(q - zero) * scale - minimum`, where q is a code, or a number that a code looks up. The
arithmetic is in float32, and the result is rounded once. Codes lie along the inputs of an output. A
byte holds several, the first in its lowest bits.

Shapes: N = outputs, K = inputs, L, U = bytes of an output's lower and upper bits. Experts come
before all of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

_CHECKED_AT_ONCE = 1 << 24  # numbers, in float32
_SIGNED_BITS = 7  # codes of so many bits, and their differences, are numbers of int8


class Cells(NamedTuple):
    """Numbers that each belong to a rectangle of a weight."""

    numbers: Tensor  # [..., rows of rectangles, columns of rectangles]
    rows: int  # of a rectangle; 0: all
    columns: int

    def of(self, first: int, end: int, num_inputs: int, group: int) -> Tensor:
        """Return the numbers of some outputs in float32, one for each `group` of inputs."""
        numbers = self.numbers
        if self.rows:
            numbers = numbers[..., first // self.rows : -(-end // self.rows), :]
        numbers = numbers.to(torch.float32)
        if self.rows > 1:
            skipped = first % self.rows
            numbers = numbers.repeat_interleave(self.rows, dim=-2)
            numbers = numbers[..., skipped : skipped + end - first, :]
        if self.columns == group or not self.columns:
            return numbers
        return numbers.repeat_interleave(self.columns // group, dim=-1)[..., : num_inputs // group]


@dataclass(frozen=True, eq=False)
class Codes:
    """The codes of one weight, or of all experts' weights."""

    name: str  # of the format, for the banner
    bits: int  # of a code
    num_outputs: int
    num_inputs: int
    lower: Tensor  # [..., N, L] uint8; or int8 or float8 values [..., N, K]
    scale: tuple[Cells, ...]  # their product
    upper: Tensor | None = None  # [..., N, U] uint8: the bits above the lowest four or two
    zero: Cells | int = 0
    minimum: tuple[Cells, ...] = ()  # their product
    table: Tensor | None = None  # the number of each code
    order: Tensor | None = None  # the input that each column multiplies, if they have an own order

    @property
    def shape(self) -> tuple[int, ...]:
        """Return that of the numbers, [..., N, K]."""
        return *self.lower.shape[:-1], self.num_inputs

    @property
    def group(self) -> int:
        """Return the inputs that share all of scale, zero and minimum."""
        columns = [each.columns for each in self._cells() if each.columns]
        return math.gcd(self.num_inputs, *columns)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors())

    def tensors(self, *, shared: bool = True) -> list[Tensor]:
        """Return all tensors; `shared`: also what experts share."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.each(note, shared=shared)
        return found

    def is_finite(self) -> bool:
        """Return whether all scales are finite, and all codes that are floats."""
        floats = [each.reshape(-1) for each in self.tensors() if each.is_floating_point()]
        return all(
            bool(each[first : first + _CHECKED_AT_ONCE].float().isfinite().all())
            for each in floats
            for first in range(0, len(each), _CHECKED_AT_ONCE)
        )

    def each(self, change: Callable[[Tensor], Tensor], *, shared: bool = True) -> Self:
        """Return these codes with every tensor changed; `shared`: also what experts share."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and (shared or field.name != "table"):
                changed[field.name] = change(value)
            elif isinstance(value, Cells):
                changed[field.name] = value._replace(numbers=change(value.numbers))
            elif isinstance(value, tuple):
                changed[field.name] = tuple(
                    each._replace(numbers=change(each.numbers)) for each in value
                )
        return replace(self, **changed)

    def expert(self, index: int | Tensor) -> Self:
        """Return the codes of one expert; `index` may be on the device, [1]."""
        if isinstance(index, Tensor):
            return self.experts(index).expert(0)
        return self.each(lambda each: each[index], shared=False)

    def experts(self, index: Tensor | slice) -> Self:
        """Return the codes of some experts; a tensor on the device may name one several times."""
        if isinstance(index, slice):
            return self.each(lambda each: each[index], shared=False)
        return self.each(lambda each: _selected(each, index), shared=False)

    def at(self, outputs: Tensor) -> Self:
        """Return the codes of some outputs, which have scales of their own."""
        found = self.each(lambda each: _selected(each, outputs), shared=False)
        return replace(found, num_outputs=len(outputs))

    def widened(self, dtype: torch.dtype, first: int = 0, end: int | None = None) -> Tensor:
        """Return the numbers of outputs from `first` on, in the order of the columns, [..., N, K].

        A number that is too large for the type is infinite.
        """
        end = self.num_outputs if end is None else min(end, self.num_outputs)
        group = self.group
        shape = *self.lower.shape[:-2], end - first, self.num_inputs // group, group
        q = self._numbers(first, end).reshape(shape)

        def of(cells: Sequence[Cells]) -> Tensor:
            parts = [each.of(first, end, self.num_inputs, group)[..., None] for each in cells]
            return parts[0] if len(parts) == 1 else parts[0] * parts[1]

        if isinstance(self.zero, Cells):
            zero = of((self.zero,))
            q = q - (zero.to(torch.int8) if self.bits <= _SIGNED_BITS else zero)
        elif self.zero:
            q = q - self.zero
        out = torch.empty(shape, dtype=dtype, device=q.device)
        if self.minimum:
            torch.sub(q * of(self.scale), of(self.minimum), out=out)
        else:
            torch.mul(q, of(self.scale), out=out)
        return out.reshape(*shape[:-2], self.num_inputs)

    def in_order(self, dtype: torch.dtype, first: int = 0, end: int | None = None) -> Tensor:
        """Return the numbers of outputs from `first` on, in the order of the inputs."""
        numbers = self.widened(dtype, first, end)
        if self.order is None:
            return numbers
        place = self.order[..., None, :].expand_as(numbers)
        return torch.empty_like(numbers).scatter_(-1, place, numbers)

    def fill(self, out_OI: Tensor, at_once: int) -> None:
        """Write the whole weight to a tensor in the order of the inputs, a piece at a time."""
        for first, end in self.pieces(at_once):
            out_OI[..., first:end, :] = self.in_order(out_OI.dtype, first, end)

    def pieces(self, at_once: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of outputs that have about so many numbers, of all experts if there are."""
        step = max(1, at_once // (self.lower.shape[:-2].numel() * self.num_inputs))
        for first in range(0, self.num_outputs, step):
            yield first, min(self.num_outputs, first + step)

    def _cells(self) -> Iterator[Cells]:
        yield from self.scale
        yield from self.minimum
        if isinstance(self.zero, Cells):
            yield self.zero

    def _numbers(self, first: int, end: int) -> Tensor:
        """Return what is multiplied by the scale, before zero points, [..., N, K]."""
        lower = self.lower[..., first:end, :]
        if lower.dtype != torch.uint8:
            # All numbers of eight bits are exact in bfloat16, too; int8 stays.
            return lower if lower.dtype == torch.int8 else lower.to(torch.bfloat16)
        lower_bits = 8 * lower.shape[-1] // self.num_inputs
        q = unpacked(lower, lower_bits)
        if self.upper is not None:
            q |= unpacked(self.upper[..., first:end, :], self.bits - lower_bits) << lower_bits
        if self.table is not None:
            return self.table.index_select(0, q.reshape(-1).int()).reshape(q.shape)
        return q.view(torch.int8) if self.bits <= _SIGNED_BITS else q.to(torch.int16)


def stacked(experts: Sequence[Codes]) -> Codes:
    """Return the codes of all experts, which have the same format, as one."""
    tensors: Any = zip(*(list(each.tensors(shared=False)) for each in experts), strict=True)
    return experts[0].each(lambda _: torch.stack(next(tensors)), shared=False)


def _selected(rows: Tensor, index: Tensor) -> Tensor:
    """Return some rows; index_select does not know all types of eight bits."""
    as_bytes = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    return as_bytes.index_select(0, index).view(rows.dtype)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in bytes, the lowest bits first: [..., B] -> [..., B * 8 / bits]."""
    if bits == 8:  # bits
        return packed
    mask = (1 << bits) - 1
    parts = [(packed >> place) & mask for place in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return bytes with codes [..., K], the first in the lowest bits."""
    if bits == 8:  # bits
        return codes
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    found = parts[..., 0].clone()
    for place in range(1, 8 // bits):
        found |= parts[..., place] << (place * bits)
    return found
