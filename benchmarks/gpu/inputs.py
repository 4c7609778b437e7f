"""The inputs of the GPU attention benchmark: sizes, and a cache full of random numbers.

Shapes: T = flat query tokens, H = query heads, K = key heads, D = dimensions of a head, N = pages,
O = offsets in a page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch

from ropewalk.model_runtime.attention.batch import Batch, Span, build_batch, single_rows
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.rope import Profile, Yarn, native_rope

PAGE_SIZE = 64  # the server's default
_NATIVE_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the measurements."""

    num_heads: int
    num_key_heads: int
    dim: int
    dtype: torch.dtype
    decodes: tuple[tuple[int, int], ...]  # context, sequences
    mixed: tuple[tuple[tuple[int, int], ...], ...]  # batches of several (context, sequences)
    rows: tuple[tuple[int, int, int], ...]  # context, sequences, and tokens of each
    tuned: tuple[tuple[int, int], ...]  # the decodes that are also measured with other tunings
    prompts: tuple[tuple[int, int], ...]  # first position and tokens of what a prefill computes
    last_position: int  # the angles before it are compared
    copy_bytes: int
    matrix: int
    warm_s: float  # seconds of products before their rates are measured
    sustained_s: float
    least_bytes: int  # memory that a measurement reads before it reads any of it again
    repeats: int

    @property
    def token_bytes(self) -> int:
        """Return the bytes of keys and values of one position in one layer."""
        return 2 * self.num_key_heads * self.dim * self.dtype.itemsize


LLAMA_3_8B = Sizes(
    num_heads=32,
    num_key_heads=8,
    dim=128,
    dtype=torch.bfloat16,
    decodes=tuple(
        (context, num_sequences)
        for context in (4096, 32_768, 131_072, 524_288)
        for num_sequences in (1, 8, 64)
        if context * num_sequences <= 131_072 * 64
    ),
    mixed=(
        ((131_072, 1), (1024, 31)),
        ((131_072, 8), (1024, 7)),
        ((3001, 3), (1000, 9)),
    ),
    # Drafts of 3 and 7, and a question of 60 tokens, behind their contexts.
    rows=((8192, 1, 4), (8192, 16, 4), (32_768, 1, 8), (32_768, 1, 60)),
    tuned=((4096, 64), (32_768, 8), (131_072, 1)),
    prompts=((0, 32_768), (30_720, 2048), (0, 1000), (0, 3001), (1000, 3001)),
    last_position=1_048_576,
    copy_bytes=4 * 2**30,
    matrix=8192,
    warm_s=0.5,
    sustained_s=2.0,
    least_bytes=2**29,  # an H200's L2 cache holds 60 MB
    repeats=20,
)
# Small enough for Triton's interpreter. A run shows that the code works, not how fast it is.
TINY = Sizes(
    num_heads=4,
    num_key_heads=2,
    dim=16,
    dtype=torch.float32,
    decodes=((100, 1), (130, 2)),
    mixed=(((300, 1), (20, 2)),),
    rows=((130, 2, 4),),
    tuned=((100, 1),),
    prompts=((0, 80), (64, 16), (0, 37)),
    last_position=4096,
    copy_bytes=2**16,
    matrix=64,
    warm_s=0.0,
    sustained_s=0.0,
    least_bytes=2**16,
    repeats=1,
)


def _num_pages(sequences: Sequence[tuple[int, int]]) -> int:
    return sum(-(-context // PAGE_SIZE) * count for context, count in sequences)


class Cache:
    """The pages of one layer, full of random numbers."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        alone = [(decode,) for decode in sizes.decodes]
        most = max(self._num_copies(each) * _num_pages(each) for each in (*alone, *sizes.mixed))
        prompts = (first + num_tokens for first, num_tokens in sizes.prompts)
        self.num_pages = max(most, -(-max(prompts) // PAGE_SIZE))
        layout = CacheLayout({0: self}, sizes.dtype, PAGE_SIZE)
        store = KVCache(layout, self.num_pages, device, row_keys=True)
        self.keys_NKDO, self.values_NKOV = store.pages(0)
        self.keys_NKDO.normal_()
        self.values_NKOV.normal_()
        native = native_rope(
            {"max_position_embeddings": _NATIVE_LEN, "head_dim": sizes.dim, "rope_theta": 5e5}
        )
        contexts = (context for each in (*alone, *sizes.mixed) for context, _ in each)
        longest = max(sizes.last_position, *contexts)
        self.tables = RopeTables(native, PAGE_SIZE, longest + PAGE_SIZE, device)
        self.profile = Profile(Yarn(factor=64.0, original_max_position_embeddings=_NATIVE_LEN))
        self.table_id = self.tables.id_of(self.profile)

    @property
    def num_key_heads(self) -> int:
        """Return K."""
        return self.sizes.num_key_heads

    @property
    def key_dim(self) -> int:
        """Return D."""
        return self.sizes.dim

    @property
    def value_dim(self) -> int:
        """Return D, which values have as well."""
        return self.sizes.dim

    @cached_property
    def _shuffled(self) -> list[int]:
        return torch.randperm(self.num_pages).tolist()

    def _num_copies(self, sequences: Sequence[tuple[int, int]]) -> int:
        batch_bytes = _num_pages(sequences) * PAGE_SIZE * self.sizes.token_bytes
        return max(1, -(-self.sizes.least_bytes // batch_bytes))

    def decode_batches(self, sequences: Sequence[tuple[int, int]]) -> list[Batch]:
        """Build batches with one query for each sequence, and no shared page.

        `sequences`: numbers of sequences by context, (context, sequences).
        """
        return [
            build_batch(spans, PAGE_SIZE, self.device) for spans in self._last_tokens(sequences)
        ]

    def row_batches(
        self, context: int, count: int, num_tokens: int, *, shared: bool
    ) -> list[Batch]:
        """Build batches whose rows are the last tokens of each sequence.

        `shared`: those of a sequence read its keys together; otherwise, each row reads them.
        """
        batches = []
        for spans in self._last_tokens(((context, count),)):
            first = context - num_tokens
            rows = single_rows(
                [each._replace(token_ids=[0] * num_tokens, first_position=first) for each in spans]
            )
            if not shared:
                rows = [row._replace(pages=list(row.pages)) for row in rows]
            batches.append(build_batch(rows, PAGE_SIZE, self.device))
        return batches

    def _last_tokens(self, sequences: Sequence[tuple[int, int]]) -> Iterator[list[Span]]:
        """Yield the last token of each sequence, over pages of its own, for each batch."""
        contexts = [context for context, count in sequences for _ in range(count)]
        pages = iter(self._shuffled)
        for _ in range(self._num_copies(sequences)):
            yield [
                Span(
                    [0],
                    context - 1,
                    list(islice(pages, -(-context // PAGE_SIZE))),
                    self.table_id,
                    range(0),
                )
                for context in contexts
            ]

    def chunk_batch(self, first: int, num_tokens: int) -> Batch:
        pages = self._shuffled[: -(-(first + num_tokens) // PAGE_SIZE)]
        span = Span([0] * num_tokens, first, pages, self.table_id, range(0))
        return build_batch([span], PAGE_SIZE, self.device)

    def read(self, num_tokens: int, *, turned: bool = True) -> LayerRead:
        """Build a read with random queries.

        If not `turned`, the layer does not rotate, as if keys had been rotated at the write.
        """
        sizes = self.sizes
        query_THD = torch.randn(num_tokens, sizes.num_heads, sizes.dim, device=self.device)
        return LayerRead(
            query_THD.to(sizes.dtype),
            self.keys_NKDO,
            self.values_NKOV,
            self.tables.layer("all" if turned else None),
            sizes.dim**-0.5,
            sliding_window=None,
            softcap=None,
            sinks_H=None,
        )
