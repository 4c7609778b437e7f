"""The formats of weights in eight to four bits, and their layout in panels.

A weight is `scale * q`, or `scale * q - minimum`. q is an integer of few bits, and a group of
inputs of one output shares scale and minimum. In the K formats of ggml, scales and minima are small
integers. A block of 256 inputs has two factors for all its groups.

A panel holds 64 outputs, as in `skinny_gemm.py`, and is a sequence of blocks. A block begins with
the factors of its outputs in float16. Then each of its groups has, for 64 outputs beside each
other:

1. scales and minima, one byte each, in the K formats only;
2. the bits of q above the lowest four: a word of 32 bits holds those of several inputs;
3. q: a byte an input, or a word with the lowest four bits of eight inputs.

In a word of lowest bits, the first input has the lowest. Words suit vectors of 32-bit lanes: one
load serves eight inputs, and a mask takes one out. `upper_place` says where an input's upper bits
are: beside the place of its lowest bits, so that most need no shift of their own.

The products are exact in float32 but for one rounding, so w is the same to the bit in every
program that computes it so. Only a zero may have another sign. Sources: `block_q4_K` and its kind
in ggml, `dequantize_row_*`.
"""

from typing import NamedTuple

PANEL = 64  # outputs, as in skinny_gemm.py
WORD = 8  # inputs whose lowest four bits make a word of 32 bits
_HALF_BYTES = 2  # of a float16


class Format(NamedTuple):
    """One format; lengths are in inputs."""

    name: str  # for the banner
    number: int  # of the format in tables of panels
    block: int
    group: int
    bits: int  # of q
    zero: int  # is subtracted from q
    has_minimum: bool
    has_byte_scales: bool  # scales in bytes, times a factor of the block

    @property
    def head_bytes(self) -> int:
        """Return the size of a block's factors."""
        return PANEL * _HALF_BYTES * (1 + self.has_minimum)

    @property
    def scale_bytes(self) -> int:
        """Return the size of a group's scales and minima in bytes; 0 if it has only factors."""
        return PANEL * (1 + self.has_minimum) if self.has_byte_scales else 0

    @property
    def upper_bits(self) -> int:
        """Return the number of bits of q above the lowest four; 0 for whole bytes."""
        return 0 if self.bits == 8 else self.bits - 4

    @property
    def upper_bytes(self) -> int:
        """Return the size of a group's upper bits."""
        return PANEL * self.group * self.upper_bits // 8

    @property
    def group_bytes(self) -> int:
        """Return the size of a group."""
        lower = PANEL * self.group * (8 if self.bits == 8 else 4) // 8
        return self.scale_bytes + self.upper_bytes + lower

    @property
    def block_bytes(self) -> int:
        """Return the size of a block of 64 outputs."""
        return self.head_bytes + self.block // self.group * self.group_bytes

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return the size of a weight in panels, with scales and the last panel's padding."""
        return -(-num_outputs // PANEL) * (num_inputs // self.block) * self.block_bytes


def upper_place(index: int, upper_bits: int) -> int:
    """Return the first bit of an input's upper bits in their word; `index` is among its inputs.

    Eight inputs follow their lowest four bits, the next eight the upper bits of the first, and so
    on. The last ones begin again at bit 0.
    """
    return (index % WORD * 4 + 4 + index // WORD * upper_bits) % 32


def block_outputs(num_outputs: int, num_inputs: int, most_bytes: int) -> int:
    """Return the outputs of a block of a weight that is widened to float32 for many rows.

    It takes `most_bytes` at most, but for a single panel. Blocks are equal, because the product of
    a last block takes as long as that of a whole one.
    """
    num_panels = -(-num_outputs // PANEL)
    most = max(1, most_bytes // (4 * PANEL * num_inputs))
    return -(-num_panels // -(-num_panels // most)) * PANEL


INT8 = Format("int8", 0, 32, 32, 8, 0, has_minimum=False, has_byte_scales=False)
Q4_0 = Format("Q4_0", 1, 32, 32, 4, 8, has_minimum=False, has_byte_scales=False)
# Its minimum is added in ggml. It is stored with the other sign here.
Q4_1 = Format("Q4_1", 2, 32, 32, 4, 0, has_minimum=True, has_byte_scales=False)
Q4_K = Format("Q4_K", 3, 256, 32, 4, 0, has_minimum=True, has_byte_scales=True)
Q5_K = Format("Q5_K", 4, 256, 32, 5, 0, has_minimum=True, has_byte_scales=True)
Q6_K = Format("Q6_K", 5, 256, 16, 6, 32, has_minimum=False, has_byte_scales=True)
# The most that a block of widened weights takes. With blocks of 1 MiB, products of 256 rows take a
# seventh longer.
SCRATCH_BYTES = 8 << 20
FORMATS = (INT8, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K)


def panels_text(formats: str) -> str:
    """Return how weights of these formats are multiplied, for the banner."""
    return f"{formats} panels, multiplied in float32"
