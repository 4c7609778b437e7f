"""Dual Chunk Attention: positions that begin again in every chunk (arXiv 2402.17463).

Shapes: T = queries.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rope.positions.method import KeyMap, PositionMethod, Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DualChunk(PositionMethod):
    """Three ranges: the query's own chunk, the one before it, and all earlier ones.

    Chunks have M = chunk_size - local_size tokens, and keys stand at n mod M. With r = p mod M, the
    query stands at r for its own chunk, at min(r + M, C) for the one before and at min(2M - 1, C)
    for earlier ones. This is the form of ChunkLlama's code (2add4d7), where C is 3/4 L and M is
    5/8 L, and of Qwen2.5-1M (vLLM 0.8.5), where C is L. The paper has M = 3/4 L and C = L - 1.
    """

    method: ClassVar[str] = "dual_chunk"
    chunk_size: int  # C: no query stands further than this
    local_size: int  # distances up to this many tokens are the true ones; M = C - local
    temperature_factor: float = 1.0  # Qwen's s: logits of rotated dimensions are multiplied by s^2

    @property
    def chunk(self) -> int:
        """Return M, the tokens of a chunk."""
        return self.chunk_size - self.local_size

    @property
    def key_maps(self) -> tuple[KeyMap, ...]:
        return (KeyMap(modulus=self.chunk),) * 3

    @property
    def num_native(self) -> int:
        """Return M: a query in the first chunk reads it only. With a temperature there is none."""
        return self.chunk if self.temperature_factor == 1 else 0

    @property
    def attention_factor(self) -> float:
        """Return s, which multiplies query and key."""
        return self.temperature_factor

    def ranges(self, positions_T: "Tensor") -> tuple[Range, ...]:
        """Return earlier chunks, the chunk before, and the query's own chunk."""
        own_T = positions_T // self.chunk * self.chunk
        before_T = (own_T - self.chunk).clamp(min=0)
        rest_T = positions_T - own_T
        far = min(2 * self.chunk - 1, self.chunk_size)
        # A query without such keys stands at no position that does not exist.
        earlier_T = (positions_T * 0 + far).minimum(positions_T)
        succeeding_T = (rest_T + self.chunk).clamp(max=self.chunk_size).minimum(positions_T)
        return (
            Range(own_T * 0, before_T, earlier_T),
            Range(before_T, own_T, succeeding_T),
            Range(own_T, positions_T + 1, rest_T),
        )

    def reach(self, native_len: int) -> int | None:  # noqa: ARG002
        """Return None: positions begin again in every chunk."""
        return None
