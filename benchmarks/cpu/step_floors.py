"""`python -m benchmarks.cpu.step_floors`: where the time of a step goes, beside its floor.

The table has a row for each kind of step and number of threads. Products, widening and attention
are also run alone, on as many rows, and the rest is what remains of the whole step. A floor is the
time of the operations at the measured rate of multiply-adds, or of the bytes at the measured rate
of reading, whichever is longer. Both rates are those of as many threads in the same run.

A model of the shape is made in memory, with random weights in the types of a Q4_K_M file. Few
layers suffice, because every layer takes as long: times are those of the layers that were made. The
last layer computes all rows, too, which it does not when a model is served.

Shapes: T = flat tokens, C = columns that hold head beside head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.cpu.kernels import Rates, measured_rates, shortest_of
from benchmarks.models.few_bits import fill_with
from benchmarks.models.gguf_parts import q4_k_m
from benchmarks.models.llama import SHAPES, Shape, llama_config
from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AttentionParams,
    Ints,
    Numbers,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import joined_table
from ropewalk.model_runtime.cpu_kernels.low_bits.widen import numbers_of, widener
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import CHUNK, PANEL
from ropewalk.model_runtime.cpu_kernels.threads import even_shares, run_shares
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers.low_bits.product import LowBitProduct
from ropewalk.model_runtime.layers.packed_linear import products_of
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, prepare_model
from ropewalk.model_runtime.loading.files.pretrained import load_tokenizer
from ropewalk.model_runtime.loading.low_bits.sizes import Activations
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile

_PAGE = 64
_CONTEXT = 128  # tokens before a decoded one
_MOST_TOKENS = 2048  # of a sequence
_NATIVE_LEN = 4096


class Kind(NamedTuple):
    """A kind of step: sequences that decode, and tokens of a prompt."""

    num_decodes: int
    num_prompt: int

    def __str__(self) -> str:
        rows = f"{self.num_decodes or self.num_prompt:,}"
        return f"{rows} + {self.num_prompt}" if self.num_decodes and self.num_prompt else rows


KINDS = (Kind(1, 0), Kind(8, 0), Kind(8, 128), Kind(0, 64), Kind(0, 512), Kind(0, 2048))


class Row(NamedTuple):
    """A row of the table; times are in ms."""

    kind: Kind
    num_threads: int
    parts: dict[str, tuple[float, float | None]]  # part -> its time, and its floor


@dataclass(frozen=True, slots=True)
class Made:
    """A model of a shape with fewer layers, ready to run steps."""

    shape: Shape  # its layers are those that were made
    checkpoint: Checkpoint
    runner: ModelRunner
    table_id: int

    @property
    def head(self) -> LowBitProduct:
        model: Any = self.checkpoint.model
        found: LowBitProduct = model.get_output_embeddings().product
        return found

    @property
    def products(self) -> list[LowBitProduct]:
        """Return the products of the layers."""
        found: list[Any] = products_of(self.checkpoint.model)
        return [each for each in found if each is not self.head]

    def spans(self, kind: Kind) -> list[Span]:
        """Return the spans of a step; the last token of each has logits."""
        per_sequence = _MOST_TOKENS // _PAGE
        parts = [(_CONTEXT, 1)] * kind.num_decodes + [(0, kind.num_prompt)] * (kind.num_prompt > 0)
        return [
            Span(
                [7 + (5 * at) % 200 for at in range(count)],
                first,
                range(sequence * per_sequence, (sequence + 1) * per_sequence),
                self.table_id,
                range(count - 1, count),
            )
            for sequence, (first, count) in enumerate(parts)
        ]


_SENSITIVE = {"v_proj": "attn_v", "down_proj": "ffn_down"}  # to their names in GGUF


def format_of(name: str, num_layers: int) -> Format:
    """Return the type that a file in Q4_K_M has for a weight of a Llama."""
    layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
    if layer is None:
        return BY_TYPE["Q6_K" if "head" in name else "Q4_K"]
    found = _SENSITIVE.get(name.split(".")[-2], name)
    return BY_TYPE[q4_k_m(found, layer, num_layers).name]


def make(
    shape: Shape, num_layers: int, activations: Activations = "exact",
    dtype: torch.dtype = torch.float32,
) -> Made:  # fmt: skip
    """Make the model in memory with `num_layers` layers. Raises ModelError if it cannot run."""
    fewer = replace(shape, layers=num_layers)
    config = llama_config(fewer, _NATIVE_LEN, dtype=dtype)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    fill_with(model, partial(format_of, num_layers=num_layers))
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    checkpoint = prepare_model(model, tokenizer, frozenset(), {}, activations=activations)
    tokens = (max(kind.num_decodes for kind in KINDS) + 1) * _MOST_TOKENS
    engine = EngineConfig(kv_cache_tokens=tokens, max_model_len=_MOST_TOKENS, page_size=_PAGE)
    runner = build_runner(checkpoint, engine)
    model.forward.takes_pruned = lambda *_: False
    native = checkpoint.native
    table_id = runner.table_id(Profile(native.tables[native.scaled_layer_type].scaling))
    return Made(fewer, checkpoint, runner, table_id)


def products_of_rows(
    products: Sequence[LowBitProduct], num_rows: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """Return a call that multiplies so many rows by each of the products."""
    widths = {each.in_features for each in products}
    rows = {width: _random_rows(num_rows, width, dtype) for width in widths}

    def run() -> None:
        for each in products:
            each.multiply(rows[each.in_features])

    return run


def _random_rows(num_rows: int, width: int, dtype: torch.dtype) -> Numbers:
    """Return random rows as a numpy array; bfloat16 as its bits."""
    numbers = np.random.default_rng(0).standard_normal((num_rows, width), np.float32)
    return as_numpy(torch.from_numpy(numbers).to(dtype))  # type: ignore[no-any-return]


def widening_of(products: Sequence[LowBitProduct], num_threads: int) -> Callable[[], None]:
    """Return a call that widens all weights once, as products of several rows do.

    Each chunk is written to the memory of the chunk before it, which stays in the level-1 cache.
    """
    kinds = numbers_of(weights.kind for each in products for weights in each.weights)
    tables = [(joined_table(each.weights), each.in_features) for each in products]
    widen = _panels_widener(kinds)

    def run() -> None:
        for table_P2, num_inputs in tables:
            shares = even_shares(len(table_P2), 1, num_threads)
            run_shares(widen, shares, table_P2, num_inputs)

    return run


@cache
def _panels_widener(kinds: tuple[int, ...]) -> Any:
    """Compiled: the panels `first` to `end` - 1 of a table, chunk by chunk."""
    widen = widener(kinds)

    @jit()
    def widen_panels(table_P2: Ints, num_inputs: int, first: int, end: int) -> None:
        out_Q = np.empty(CHUNK * PANEL, np.float32)
        for panel in range(first, end):
            for chunk in range(0, num_inputs, CHUNK):
                stop = min(num_inputs, chunk + CHUNK)
                widen(table_P2[panel, 1], table_P2[panel, 0], chunk, stop, out_Q)

    return widen_panels


def attention_of(made: Made, kind: Kind) -> Callable[[], None]:
    """Return a call that writes and reads the cache as all layers of a step do."""
    shape, runner = made.shape, made.runner
    batch = build_batch(made.spans(kind), _PAGE, torch.device("cpu"))
    key_at, num_key_columns = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    value_at = key_at + num_key_columns
    width = value_at + num_key_columns
    joined_TC = _random_rows(batch.token_ids_1T.shape[1], width, made.checkpoint.dtype)
    tables = runner._tables.layer(made.checkpoint.native.scaled_layer_type)  # noqa: SLF001
    params = AttentionParams(tables.kernel_arrays, np.float32(shape.head_dim**-0.5))

    def run() -> None:
        backend = CpuAttention(batch)
        for layer in range(shape.layers):
            pages: Any = runner._store.arrays[layer]  # noqa: SLF001
            backend.write_columns(joined_TC, key_at, joined_TC, value_at, pages)
            backend.attend(joined_TC, shape.heads, pages, params)

    return run


def floors(made: Made, kind: Kind, rates: Rates) -> dict[str, float]:
    """Return the least seconds of each part of a step with the layers that were made."""
    shape = made.shape
    num_rows = kind.num_decodes + kind.num_prompt
    num_logits = kind.num_decodes + (kind.num_prompt > 0)
    work = {
        name: [(each.in_features * each.out_features, _num_bytes(each)) for each in products]
        for name, products in (("layers", made.products), ("head", [made.head]))
    }
    keys = kind.num_decodes * (_CONTEXT + 1) + kind.num_prompt * (kind.num_prompt + 1) / 2
    stored = kind.num_decodes * (_CONTEXT + 1) + kind.num_prompt
    dims = shape.layers * shape.head_dim
    return {
        "products": sum(rates.floor(2 * num_rows * size, read) for size, read in work["layers"]),
        "widening": sum(rates.floor(0, read) for _, read in work["layers"]),
        "attention": rates.floor(4 * shape.heads * dims * keys, 8 * shape.kv_heads * dims * stored),
        "head": sum(rates.floor(2 * num_logits * size, read) for size, read in work["head"]),
    }


def _num_bytes(product: LowBitProduct) -> int:
    return sum(each.memory.nbytes for each in product.weights)


def row_of(made: Made, kind: Kind, rates: Rates, rounds: int) -> Row:
    """Measure a kind of step and its parts, in turns."""
    num_threads, spans = torch.get_num_threads(), made.spans(kind)
    num_rows = kind.num_decodes + kind.num_prompt
    took = shortest_of(
        {
            "step": partial(made.runner.run, spans),
            "products": products_of_rows(made.products, num_rows, made.checkpoint.dtype),
            "widening": widening_of(made.products, num_threads),
            "attention": attention_of(made, kind),
            "head": products_of_rows([made.head], len(spans), made.checkpoint.dtype),
        },
        rounds,
    )
    least = floors(made, kind, rates)
    took["rest"] = took["step"] - sum(took[name] for name in _ADDED)
    least["step"] = sum(least[name] for name in _ADDED)
    parts = {
        name: (1e3 * each, 1e3 * least[name] if name in least else None)
        for name, each in took.items()
    }
    return Row(kind, num_threads, parts)


_ADDED = ("products", "attention", "head")  # and the rest; widening is a part of products
_COLUMNS = ("step", "products", "widening", "attention", "head", "rest")


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown; a cell has the time in ms and its floor."""
    lines = [
        f"| rows | threads | {' | '.join(_COLUMNS)} | times one thread |",
        f"|---|---:|{'---:|' * len(_COLUMNS)}---:|",
    ]
    single = {row.kind: row.parts["step"][0] for row in rows if row.num_threads == 1}
    for row in rows:
        cells = [
            f"{took:.1f}" if least is None else f"{took:.1f} ({least:.1f})"
            for took, least in (row.parts[name] for name in _COLUMNS)
        ]
        base = single.get(row.kind)
        times = "" if base is None else f"{base / row.parts['step'][0]:.2f}"
        lines.append(f"| {row.kind} | {row.num_threads} | {' | '.join(cells)} | {times} |")
    return "\n".join(lines)


def kinds_of(text: str) -> list[Kind]:
    """Return the kinds of steps that a list names, such as "1,8+128,64"."""
    known = {str(kind).replace(" ", "").replace(",", ""): kind for kind in KINDS}
    unknown = [each for each in text.split(",") if each not in known]
    if unknown:
        raise click.BadParameter(f"--kinds: has {unknown[0]}, known are {', '.join(known)}")
    return [known[each] for each in text.split(",")]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--shape", type=click.Choice(["medium", "1b"]), default="1b", show_default=True)
@click.option("--layers", default=2, show_default=True, help="Layers that are made.")
@click.option("--threads", default="1,2", show_default=True, help="Numbers of threads.")
@click.option("--kinds", default=None, help="Kinds of steps. Default: all of the table.")
@click.option("--rounds", default=5, show_default=True)
@click.option(
    "--activations",
    type=click.Choice(["exact", "int8"]),
    default="exact",
    show_default=True,
    help="Floors are those of exact products in either case.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Floors are those of float32.",
)
@torch.inference_mode()
def main(
    *, shape: str, layers: int, threads: str, kinds: str | None, rounds: int,
    activations: Activations, dtype: str,
) -> None:  # fmt: skip
    """Print the time of steps by part, each with its floor in brackets, as Markdown."""
    chosen = kinds_of(kinds) if kinds else list(KINDS)
    rows = []
    for num_threads in map(int, threads.split(",")):
        torch.set_num_threads(num_threads)
        made, rates = (
            make(SHAPES[shape], layers, activations, getattr(torch, dtype)),
            measured_rates(num_threads),
        )
        click.echo(
            f"{num_threads} threads: multiply-adds {rates.operations / 1e9:.0f} GFLOP/s, "
            f"reading {rates.read_bytes / 1e9:.1f} GB/s."
        )
        rows += [row_of(made, each, rates, rounds) for each in chosen]
    click.echo(
        f"\nMilliseconds of a step of `{shape}` with {layers} of its {SHAPES[shape].layers} "
        f"layers, and their floors:\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
