"""The formats of weights in eight to two bits, and their layout in panels.

A weight is `scale * q`, or `scale * q - minimum`. q is an integer of few bits, or such an integer
looks it up in a table of sixteen numbers. A group of inputs of one output shares scale and minimum.
In the K formats of ggml, scales and minima are small integers. A block of 256 inputs has two
factors for all its groups.

A panel holds 64 outputs, as in `skinny_gemm.py`, and is a sequence of blocks. A block begins with
the factors of its outputs, in float16 or as exponents of two. Then each of its groups has, for 64
outputs beside each other:

1. scales and minima of the K formats: one byte each, or one byte for both, the scale's bits lowest;
2. the bits of q above the lowest ones, of all inputs of the group in one word;
3. q: a byte an input, or words of 32 bits with the lowest bits of several inputs.

The lowest bits are four of each of eight inputs, or two of each of sixteen. In a word, the first
input has the lowest. Words suit vectors of 32-bit lanes: one load serves all inputs of a word, and
a mask takes one out. `upper_place` says where an input's upper bits are: beside the place of its
lowest bits, so that most need no shift of their own.

The products are exact in float32 but for one rounding, so w is the same to the bit in every
program that computes it so. Only a zero may have another sign. Sources: `block_q4_K` and its kind
in ggml, `dequantize_row_*`.
"""

from typing import NamedTuple

PANEL = 64  # outputs, as in skinny_gemm.py
_WORD_BYTES = 4
_HALF_BYTES = 2  # of a float16


class Format(NamedTuple):
    """One format; lengths are in inputs."""

    name: str  # for the banner
    number: int  # of the format in tables of panels
    block: int
    group: int
    bits: int  # of q; 32: a weight is a float32, without a scale
    zero: int = 0  # is subtracted from q, or from the number that q looks up
    has_minimum: bool = False
    scale_bits: int = 0  # of scales and minima, 4 or 8, times a factor of the block; 0: no such
    has_powers: bool = False  # a factor is 2^(e - 128), and its byte holds e
    table: tuple[int, ...] = ()  # that q looks up, ascending from 0

    @property
    def num_factors(self) -> int:
        """Return the number of factors of a block: of scales, and of minima."""
        return 0 if self.bits == 32 else 1 + self.has_minimum

    @property
    def factor_bytes(self) -> int:
        return 1 if self.has_powers else _HALF_BYTES

    @property
    def head_bytes(self) -> int:
        """Return the size of a block's factors."""
        return PANEL * self.num_factors * self.factor_bytes

    @property
    def scale_bytes(self) -> int:
        """Return the size of a group's scales and minima; 0 if it has only factors."""
        return PANEL * self.num_factors * self.scale_bits // 8

    @property
    def lower_bits(self) -> int:
        """Return the number of bits of q that its own bytes or words hold."""
        return self.bits if self.bits >= 8 else 4 if self.bits >= 4 else 2

    @property
    def unit_bytes(self) -> int:
        """Return the size of the bytes or words that hold the lower bits."""
        return 1 if self.bits == 8 else _WORD_BYTES

    @property
    def unit_inputs(self) -> int:
        """Return the number of inputs of such a unit."""
        return 8 * self.unit_bytes // self.lower_bits

    @property
    def upper_bits(self) -> int:
        return self.bits - self.lower_bits

    @property
    def upper_word_bytes(self) -> int:
        """Return the size of the word with the upper bits of a group's inputs."""
        return self.group * self.upper_bits // 8

    @property
    def upper_bytes(self) -> int:
        return PANEL * self.upper_word_bytes

    @property
    def group_bytes(self) -> int:
        return self.scale_bytes + self.upper_bytes + PANEL * self.group * self.lower_bits // 8

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + self.block // self.group * self.group_bytes

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Return the size of a weight in panels, with scales and the last panel's padding."""
        return -(-num_outputs // PANEL) * (num_inputs // self.block) * self.block_bytes

    def upper_place(self, index: int) -> int:
        """Return the first bit of an input's upper bits in their word; `index` is in the group.

        The first inputs have theirs after the place of their lower bits, the next ones after the
        upper bits of the first, and so on. At the end of the word, places begin again at bit 0.
        """
        size = 8 * self.upper_word_bytes
        row, column = divmod(index, size // self.lower_bits)
        return (column * self.lower_bits + self.lower_bits + row * self.upper_bits) % size


def block_outputs(num_outputs: int, num_inputs: int, most_bytes: int) -> int:
    """Return the outputs of a block of a weight that is widened to float32 for many rows.

    It takes `most_bytes` at most, but for a single panel. Blocks are equal, because the product of
    a last block takes as long as that of a whole one.
    """
    num_panels = -(-num_outputs // PANEL)
    most = max(1, most_bytes // (4 * PANEL * num_inputs))
    return -(-num_panels // -(-num_panels // most)) * PANEL


_IQ4 = (0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240)
_E2M1 = (0, 4, 6, 8, 9, 10, 11, 12, 12, 13, 14, 15, 16, 18, 20, 24)
INT8 = Format("int8", 0, 32, 32, 8)
# The minima of Q4_1 and Q5_1 are added in ggml. They are stored with the other sign here.
FORMATS = (
    INT8,
    Format("Q4_0", 1, 32, 32, 4, zero=8),
    Format("Q4_1", 2, 32, 32, 4, has_minimum=True),
    Format("Q4_K", 3, 256, 32, 4, has_minimum=True, scale_bits=8),
    Format("Q5_K", 4, 256, 32, 5, has_minimum=True, scale_bits=8),
    Format("Q6_K", 5, 256, 16, 6, zero=32, scale_bits=8),
    Format("Q5_0", 6, 32, 32, 5, zero=16),
    Format("Q5_1", 7, 32, 32, 5, has_minimum=True),
    Format("Q2_K", 8, 256, 16, 2, has_minimum=True, scale_bits=4),
    Format("Q3_K", 9, 256, 16, 3, zero=4, scale_bits=8),
    Format("IQ4_NL", 10, 32, 32, 4, zero=127, table=_IQ4),
    Format("IQ4_XS", 11, 256, 32, 4, zero=127, scale_bits=8, table=_IQ4),
    Format("MXFP4", 12, 32, 32, 4, zero=12, has_powers=True, table=_E2M1),
    # Linears that stay floats and read one input with linears of few bits (`layers/low_bits/`).
    Format("float32", 13, 32, 32, 32),
)
FLOAT32, MXFP4 = FORMATS[-1], FORMATS[-2]
# Type of a GGUF file -> the format that holds its bits.
BY_TYPE = {"Q8_0" if kind is INT8 else kind.name: kind for kind in FORMATS if kind.bits <= 8}


ROUNDED = "integers, rows rounded to int8"  # as numbers of `panels_text`


def panels_text(formats: str, numbers: str) -> str:
    """Return how weights of these formats are multiplied, for the banner; `numbers`: in a type."""
    return f"{formats} panels, multiplied in {numbers}"
