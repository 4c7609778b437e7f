"""The position methods: dual chunks, and those with a near range and a far one.

Shapes: T = queries.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ropewalk.rope.positions import NATIVE_KEYS, UNROTATED_KEYS, KeyMap, PositionMethod, Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DualChunk(PositionMethod):
    """Dual Chunk Attention: positions begin again in every chunk (arXiv 2402.17463).

    A query reads three ranges: its own chunk, the one before it, and all earlier ones.

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


def _two_ranges(
    positions_T: "Tensor", window: int, far_query_T: "Tensor | int"
) -> tuple[Range, ...]:
    """Return the far range of all keys before the window, and the near one of `window` keys."""
    cut_T = (positions_T - window + 1).clamp(min=0)
    # A query without far keys stands at no position that does not exist.
    far_T = (positions_T * 0 + far_query_T).minimum(positions_T)
    return Range(cut_T * 0, cut_T, far_T), Range(cut_T, positions_T + 1, positions_T)


@dataclass(frozen=True, slots=True)
class ReRope(PositionMethod):
    """Rectified positions: no key is further away than the window (Su, kexue.fm/archives/9708).

    The distance is min(p - n, w). The far query stands at w and the far keys at 0.
    """

    method: ClassVar[str] = "rerope"
    window: int  # w, tokens

    @property
    def key_maps(self) -> tuple[KeyMap, ...]:
        """Return the key maps: far keys are not rotated."""
        return UNROTATED_KEYS, NATIVE_KEYS

    @property
    def num_native(self) -> int:
        """Return w. The first far key is w tokens away, which is its true distance, too."""
        return self.window

    def ranges(self, positions_T: "Tensor") -> tuple[Range, ...]:
        return _two_ranges(positions_T, self.window, self.window)

    def reach(self, native_len: int) -> int | None:  # noqa: ARG002
        """Return None: far keys of any number are at one distance."""
        return None


@dataclass(frozen=True, slots=True)
class SelfExtend(PositionMethod):
    """Grouped positions behind a window (SelfExtend, arXiv 2401.01325).

    Far keys stand at n // G and the far query at p // G + w - w // G. The authors' eager code has
    w / G there and their decode w // G; both are the same, because G must divide w.
    """

    method: ClassVar[str] = "self_extend"
    window: int  # w, tokens
    group: int  # G, tokens that share a far position

    @property
    def key_maps(self) -> tuple[KeyMap, ...]:
        return KeyMap(divisor=self.group), NATIVE_KEYS

    @property
    def num_native(self) -> int:
        """Return w: the first far key is w tokens away or a little less."""
        return self.window

    def ranges(self, positions_T: "Tensor") -> tuple[Range, ...]:
        shift = self.window - self.window // self.group
        return _two_ranges(positions_T, self.window, positions_T // self.group + shift)

    def reach(self, native_len: int) -> int | None:
        return (native_len - self.window) * self.group + self.window


@dataclass(frozen=True, slots=True)
class Shifted(PositionMethod):
    """STRING: far keys are nearer by a constant (arXiv 2410.18745), for use inside L.

    A key at least S tokens away is seen S - W tokens nearer. The reference's prefill counts the
    distance S twice and its decode does not; this follows the decode.
    """

    method: ClassVar[str] = "string"
    shift: int  # S, tokens
    window: int  # W, the distance at which the first far key is seen
    factor: float = 1.0  # of cos and sin

    @property
    def key_maps(self) -> tuple[KeyMap, ...]:
        return NATIVE_KEYS, NATIVE_KEYS

    @property
    def num_native(self) -> int:
        """Return S. With a factor there is none."""
        return self.shift if self.factor == 1 else 0

    @property
    def attention_factor(self) -> float:
        return self.factor

    def ranges(self, positions_T: "Tensor") -> tuple[Range, ...]:
        return _two_ranges(positions_T, self.shift, positions_T - (self.shift - self.window))

    def reach(self, native_len: int) -> int | None:
        return native_len + self.shift - self.window


@dataclass(frozen=True, slots=True)
class Sinks(PositionMethod):
    """The first tokens and a window of the newest (StreamingLLM, arXiv 2309.17453).

    A query sees the first s tokens and the last r. The sinks are seen as if they stood right before
    the window, as in a cache that holds nothing else. Keys between them are not read.
    """

    method: ClassVar[str] = "sinks"
    sinks: int  # s, tokens
    window: int  # r, tokens, the query's own included

    @property
    def key_maps(self) -> tuple[KeyMap, ...]:
        return NATIVE_KEYS, NATIVE_KEYS

    @property
    def num_native(self) -> int:
        return self.sinks + self.window

    @property
    def kept(self) -> tuple[int, int] | None:
        return self.sinks, self.window

    def ranges(self, positions_T: "Tensor") -> tuple[Range, ...]:
        """Return the sinks and the window. They are one range, the second, up to s + r tokens."""
        end_T = positions_T + 1
        is_cut_T = end_T > self.num_native
        recent_T = (end_T - self.window) * is_cut_T
        placed_T = positions_T.clamp(max=self.num_native - 1)
        return (
            Range(end_T * 0, self.sinks * is_cut_T, placed_T),
            Range(recent_T, end_T, positions_T),
        )

    def reach(self, native_len: int) -> int | None:  # noqa: ARG002
        """Return None: no distance is longer than s + r."""
        return None
