"""`python -m benchmarks.gpu.attention`: attention on a GPU, against the GPU's own rates.

The measurements are described in gpu.md. They cover one layer in the shape of Llama 3 8B.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
import torch
import triton
from torch import Tensor
from transformers import LlamaConfig
from transformers import __version__ as transformers_version
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.gpu.clock import (
    Work,
    copy_rate,
    first_seconds,
    kernel_names,
    matrix_rates,
    read_rate,
    seconds,
)
from benchmarks.gpu.inputs import LLAMA_3_8B, PAGE_SIZE, TINY, Cache, Sizes
from benchmarks.gpu.positions import measure_positions
from benchmarks.gpu.report import markdown
from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.prompt_groups import Prompts
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.attention.work_list import Rows, WorkList, contexts_of
from ropewalk.model_runtime.gpu.attend import attend
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.cards.tuning import Tuning, tuning_of
from ropewalk.model_runtime.gpu.decode import cut_of, decode
from ropewalk.model_runtime.gpu.prefill import prefill
from ropewalk.rope.angles import offset_angles, page_start_angles, position_angles
from ropewalk.studies.harness.jsonl_file import LineFile

PARTS = ("decode", "rows", "prefill", "tuning", "positions")
Sequences = Sequence[tuple[int, int]]  # numbers of sequences by context: (context, sequences)
_MOST_ERROR = 1e-2
_TUNINGS = tuple(
    Tuning(num_warps, num_stages, programs)
    for num_warps in (4, 8)
    for num_stages in (2, 3, 5, 7)
    for programs in (1, 2, 3)
)
_LOOKED_AT = 4096  # positions whose angles are compared


class Rates(Protocol):
    """The sizes at which the machine's own rates are measured."""

    @property
    def copy_bytes(self) -> int:
        """Bytes that are copied, and read."""

    @property
    def matrix(self) -> int:
        """Rows and columns of the matrices."""

    @property
    def warm_s(self) -> float:
        """Seconds of products before they are measured."""

    @property
    def sustained_s(self) -> float:
        """Seconds of products without a pause."""

    @property
    def repeats(self) -> int:
        """Runs of each measurement."""


def measure(
    sizes: Sizes, device: torch.device, commit: str, parts: Collection[str] = PARTS
) -> Iterator[dict[str, Any]]:
    """Yield one row per measurement; `part` names its kind.

    The machine, its rates and the check of the answers come first, whatever the parts are.
    """
    yield {"part": "machine", **machine(device, commit)}
    rates = ceilings(sizes, device)
    yield {"part": "ceilings", **rates}
    copy, matrix = rates["copy_bytes_s"], rates["matrix_flop_s"]
    yield {"part": "angles", **angle_errors(sizes, device)}
    cache = Cache(sizes, device)
    yield {"part": "error", **_errors(cache)}
    if "decode" in parts:
        for sequences in (*(((each),) for each in sizes.decodes), *sizes.mixed):
            yield {"part": "decode", **_decode(cache, sequences, copy)}
    if "rows" in parts:
        yield from _rows(cache)
    if "prefill" in parts:
        yield from _prefill(cache, matrix)
    if "tuning" in parts:
        for decoded in sizes.tuned:
            yield from _tuned(cache, (decoded,), copy)
    if "positions" in parts:  # last: its tables change how all later reads are launched
        yield from measure_positions(cache)


def ceilings(sizes: Rates, device: torch.device) -> dict[str, float]:
    """Return the machine's own rates: bytes copied and read, and operations, in a second."""
    matrix = matrix_rates(device, sizes.matrix, sizes.repeats, sizes.warm_s, sizes.sustained_s)
    return {
        "copy_bytes_s": copy_rate(device, sizes.copy_bytes, sizes.repeats),
        "read_bytes_s": read_rate(device, sizes.copy_bytes, sizes.repeats),
        "matrix_flop_s": matrix.burst,
        "sustained_flop_s": matrix.sustained,
    }


def machine(device: torch.device, commit: str) -> dict[str, Any]:
    """Return the device, the versions, the date and the commit."""
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers_version,
        "python": sys.version.split()[0],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
    }


def angle_errors(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return the largest cosine errors near the last position, ours and transformers'.

    Both are float32, without scaling, and are compared with float64 positions times the same
    float32 frequencies.
    """
    config = LlamaConfig(
        hidden_size=sizes.num_heads * sizes.dim,
        num_attention_heads=sizes.num_heads,
        max_position_embeddings=sizes.last_position,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    theirs = LlamaRotaryEmbedding(config).to(device)
    first = sizes.last_position - min(_LOOKED_AT, sizes.last_position)
    positions_T = torch.arange(first, sizes.last_position, device=device)
    inv_freq_P = theirs.inv_freq.float()
    exact_TP = torch.outer(positions_T.double().cpu(), inv_freq_P.double().cpu()).cos()
    pages = page_start_angles(inv_freq_P, -(-sizes.last_position // PAGE_SIZE), PAGE_SIZE)
    ours_TP = position_angles(pages, offset_angles(inv_freq_P, PAGE_SIZE), positions_T).cos
    cos, _ = theirs(torch.zeros(1, device=device), positions_T[None])
    return {
        "position": sizes.last_position,
        "cosine_error": _largest(ours_TP, exact_TP),
        "transformers_cosine_error": _largest(cos[0, :, : sizes.dim // 2], exact_TP),
    }


def _largest(got: Tensor, exact: Tensor) -> float:
    return float((got.double().cpu() - exact).abs().max())


def _errors(cache: Cache) -> dict[str, Any]:
    """Return both reads' relative difference to the reference read; raise ValueError if large."""
    first, num_tokens = cache.sizes.prompts[1]
    found = {}
    for name, batch in (
        ("decode", cache.decode_batches((cache.sizes.decodes[0],))[0]),
        ("prefill", cache.chunk_batch(first // 8, num_tokens)),
    ):
        read = cache.read(len(batch.page_T))
        exact = TorchAttention(batch).read(read)
        got = TritonAttention(batch).read(read).float()
        found[name] = float((got - exact).norm() / exact.norm())
        if not found[name] < _MOST_ERROR:
            raise ValueError(f"{name} differs by {found[name]:.3g} from the reference")
    return found


def _decode(cache: Cache, sequences: Sequences, copy: float) -> dict[str, Any]:
    """Measure the decode kernel, and the same over rotated keys."""
    num_tokens = sum(context * count for context, count in sequences)
    num_bytes = num_tokens * cache.sizes.token_bytes
    first_s, took = _decode_seconds(cache, sequences)
    _, rotated = _decode_seconds(cache, sequences, turned=False)
    return {
        "batch": " + ".join(f"{count} x {context:,}" for context, count in sequences),
        "context": max(context for context, _ in sequences),
        "sequences": sum(count for _, count in sequences),
        "bytes": num_bytes,
        "seconds": took,
        "first_s": first_s,
        "rotated_seconds": rotated,
        "share_of_copy": num_bytes / took / copy,
        "over_rotated": took / rotated,
    }


def _decode_work(read: LayerRead, batch: Batch, tuning: Tuning) -> Work:
    """Return the call that is measured, with its list of pieces made before."""
    _, _, position_S, table_id_S = np.array(batch.places_S).T
    rows, cut = Rows(position_S, table_id_S, np.array(batch.same_pages_S)), cut_of(read, tuning)
    work = WorkList.of(contexts_of(rows, cut, {}), cut, read.query_THD.device)
    out_THV = torch.empty_like(read.query_THD)
    return lambda: decode(read, batch, work, out_THV, tuning)


def _decode_seconds(
    cache: Cache,
    sequences: Sequences,
    *,
    turned: bool = True,
    tuning: Tuning | None = None,
) -> tuple[float, float]:
    """Return the time of the first call, with the host's part, and the median of a replay."""
    return _batch_seconds(cache, cache.decode_batches(sequences), turned=turned, tuning=tuning)


def _batch_seconds(
    cache: Cache, batches: Sequence[Batch], *, turned: bool = True, tuning: Tuning | None = None
) -> tuple[float, float]:
    """Return the times of the first batch's first call, and of a replay of one batch."""
    read = cache.read(len(batches[0].page_T), turned=turned)
    works = [_decode_work(read, batch, tuning or tuning_of(read)) for batch in batches]
    first_s = first_seconds(cache.device, works[0])
    return first_s, seconds(cache.device, works, cache.sizes.repeats)


def _rows(cache: Cache) -> Iterator[dict[str, Any]]:
    """Measure tokens of one sequence as rows that read its keys together, and each alone."""
    for context, count, num_tokens in cache.sizes.rows:
        took = {}
        for shared in (True, False):
            batches = cache.row_batches(context, count, num_tokens, shared=shared)
            _, took[shared] = _batch_seconds(cache, batches)
        yield {
            "part": "rows",
            "batch": f"{count} x {num_tokens} behind {context - num_tokens:,}",
            "seconds": took[True],
            "alone_seconds": took[False],
            "over_alone": took[True] / took[False],
        }


def _tuned(cache: Cache, sequences: Sequences, copy: float) -> Iterator[dict[str, Any]]:
    """Measure the decode kernel with other numbers of warps, stages and programs."""
    ((context, num_sequences),) = sequences
    num_bytes = context * num_sequences * cache.sizes.token_bytes
    for tuning in _TUNINGS:
        _, took = _decode_seconds(cache, sequences, tuning=tuning)
        yield {
            "part": "tuning",
            "context": context,
            "sequences": num_sequences,
            **asdict(tuning),
            "seconds": took,
            "share_of_copy": num_bytes / took / copy,
        }


def _prefill(cache: Cache, matrix: float) -> Iterator[dict[str, Any]]:
    """Measure whole prompts and last chunks, by torch's flash attention and by our kernel."""
    sizes = cache.sizes
    for first, num_tokens in sizes.prompts:
        batch = cache.chunk_batch(first, num_tokens)
        read = cache.read(num_tokens)
        out_THV = torch.empty_like(read.query_THD)
        prompts, page_table_SN = Prompts(batch), batch.page_table_SN
        seen = num_tokens * first + num_tokens * (num_tokens + 1) // 2
        num_operations = 4 * sizes.num_heads * sizes.dim * seen
        for kernel, chosen in (("torch", None), ("own", attend)):
            work = partial(prefill, read, prompts, page_table_SN, out_THV, chosen)
            first_s = first_seconds(cache.device, work)
            took = seconds(cache.device, [work], sizes.repeats)
            yield {
                "part": "prefill",
                "kernel": kernel,
                "names": kernel_names(cache.device, work),
                "tokens": num_tokens,
                "context": first + num_tokens,
                "seconds": took,
                "first_s": first_s,
                "share_of_matrix": num_operations / took / matrix,
            }


@click.command()
@click.option(
    "--record",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Each measurement is added to it as a line of JSON.",
)
@click.option("--commit", default="unknown", help="The measured commit; told above the tables.")
@click.option(
    "--parts",
    "named",
    default="decode,prefill",
    show_default=True,
    help="Some of decode, prefill, positions and tuning (other warps, stages and cuts).",
)
@click.option("--tiny", is_flag=True, help="Sizes for Triton's interpreter: numbers mean nothing.")
def main(path: Path | None, commit: str, named: str, *, tiny: bool) -> None:
    """Measure the attention of one layer on the GPU, and print tables as Markdown."""
    parts = named.split(",")
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise click.BadParameter(
            f"{unknown[0]} is none of {', '.join(PARTS)}", param_hint="--parts"
        )
    if not tiny and not torch.cuda.is_available():
        click.echo("benchmarks.gpu.attention: torch finds no CUDA device here", err=True)
        sys.exit(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = None if path is None else LineFile(path)
    rows = []
    for row in measure(TINY if tiny else LLAMA_3_8B, device, commit, parts):
        rows.append(row)
        click.echo(f"{row}", err=True)
        if lines is not None:
            lines.add(row)
    click.echo(markdown(rows))


if __name__ == "__main__":
    main()
