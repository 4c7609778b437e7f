"""`python -m benchmarks.gpu_attention`: attention on a GPU, against the GPU's own rates.

The measurements are described in gpu.md. They cover one layer in the shape of Llama 3 8B.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import triton
from torch import Tensor
from transformers import LlamaConfig
from transformers import __version__ as transformers_version
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.gpu_clock import Work, copy_rate, matrix_rate, seconds
from benchmarks.gpu_inputs import LLAMA_3_8B, PAGE_SIZE, TINY, Cache, Sizes
from benchmarks.gpu_report import markdown
from model_runtime.attention.key_range import KeyRange
from model_runtime.attention.prompt_groups import Prompts
from model_runtime.attention.torch_backend import TorchAttention
from model_runtime.attention.triton_attend import attend
from model_runtime.attention.triton_backend import TritonAttention
from model_runtime.attention.triton_decode import Tuning, cut_of, decode
from model_runtime.attention.triton_prefill import prefill
from model_runtime.batch import Batch
from model_runtime.work_list import WorkList, whole_bounds
from rope import offset_angles, page_start_angles, position_angles
from server.jsonl_file import LineFile

_MOST_ERROR = 1e-2
_TUNINGS = tuple(
    Tuning(num_warps, num_stages, programs)
    for num_warps in (4, 8)
    for num_stages in (2, 3, 5, 7)
    for programs in (1, 2, 3)
)
_LOOKED_AT = 4096  # positions whose angles are compared


def measure(
    sizes: Sizes, device: torch.device, commit: str, *, tune: bool
) -> Iterator[dict[str, Any]]:
    """Yield one row per measurement; `part` names its kind."""
    yield {"part": "machine", **machine(device, commit)}
    copy = copy_rate(device, sizes.copy_bytes, sizes.repeats)
    matrix = matrix_rate(device, sizes.matrix, sizes.repeats)
    yield {"part": "ceilings", "copy_bytes_s": copy, "matrix_flop_s": matrix}
    yield {"part": "angles", **angle_errors(sizes, device)}
    cache = Cache(sizes, device)
    yield {"part": "error", **_errors(cache)}
    for context, num_sequences in sizes.decodes:
        yield {"part": "decode", **_decode(cache, context, num_sequences, copy)}
    yield from _prefill(cache, matrix)
    if tune:
        for context, num_sequences in sizes.tuned:
            yield from _tuned(cache, context, num_sequences, copy)


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
    context, num_sequences = cache.sizes.decodes[0]
    found = {}
    for name, batch in (
        ("decode", cache.decode_batches(context, num_sequences)[0]),
        ("prefill", cache.chunk_batch(context // 2, cache.sizes.chunk_len)),
    ):
        read = cache.read(len(batch.page_T))
        exact = TorchAttention(batch).read(read)
        got = TritonAttention(batch).read(read).float()
        found[name] = float((got - exact).norm() / exact.norm())
        if not found[name] < _MOST_ERROR:
            raise ValueError(f"{name} differs by {found[name]:.3g} from the reference")
    return found


def _decode(cache: Cache, context: int, num_sequences: int, copy: float) -> dict[str, Any]:
    """Measure the decode kernel, and the same kernel over keys rotated at the write."""
    num_bytes = context * num_sequences * cache.sizes.token_bytes
    ours = _decode_seconds(cache, context, num_sequences)
    rotated = _decode_seconds(cache, context, num_sequences, turned=False)
    return {
        "context": context,
        "sequences": num_sequences,
        "bytes": num_bytes,
        "seconds": ours,
        "rotated_seconds": rotated,
        "share_of_copy": num_bytes / ours / copy,
        "over_rotated": ours / rotated,
    }


def _decode_seconds(
    cache: Cache,
    context: int,
    num_sequences: int,
    *,
    turned: bool = True,
    tuning: Tuning | None = None,
) -> float:
    read = cache.read(num_sequences, turned=turned)
    out_THV = torch.empty_like(read.query_THD)
    chosen = tuning or Tuning()

    def launched(batch: Batch) -> Work:
        position_S = np.array([place.first_position for place in batch.places_S])
        cut = cut_of(read, chosen)
        work = WorkList.of(*whole_bounds(position_S, cut.window), cut, cache.device)
        ranges = [KeyRange(batch.first_position_S)]
        return lambda: decode(read, batch, ranges, work, out_THV, chosen)

    works = [launched(batch) for batch in cache.decode_batches(context, num_sequences)]
    return seconds(cache.device, works, cache.sizes.repeats)


def _tuned(cache: Cache, context: int, num_sequences: int, copy: float) -> Iterator[dict[str, Any]]:
    """Measure the decode kernel with other numbers of warps, stages and programs."""
    num_bytes = context * num_sequences * cache.sizes.token_bytes
    for tuning in _TUNINGS:
        took = _decode_seconds(cache, context, num_sequences, tuning=tuning)
        yield {
            "part": "tuning",
            "context": context,
            "sequences": num_sequences,
            **asdict(tuning),
            "seconds": took,
            "share_of_copy": num_bytes / took / copy,
        }


def _prefill(cache: Cache, matrix: float) -> Iterator[dict[str, Any]]:
    """Measure a whole prompt and its last chunk, by torch's flash attention and by our kernel."""
    sizes = cache.sizes
    for num_tokens in (sizes.prefill_len, sizes.chunk_len):
        first = sizes.prefill_len - num_tokens
        batch = cache.chunk_batch(first, num_tokens)
        read = cache.read(num_tokens)
        out_THV = torch.empty_like(read.query_THD)
        prompts, page_table_SN = Prompts(batch), batch.page_table_SN
        seen = num_tokens * first + num_tokens * (num_tokens + 1) // 2
        num_operations = 4 * sizes.num_heads * sizes.dim * seen
        for kernel, chosen in (("torch", None), ("own", attend)):
            work = partial(prefill, read, prompts, page_table_SN, out_THV, chosen)
            took = seconds(cache.device, [work], sizes.repeats)
            yield {
                "part": "prefill",
                "kernel": kernel,
                "tokens": num_tokens,
                "context": sizes.prefill_len,
                "seconds": took,
                "share_of_matrix": num_operations / took / matrix,
            }


@click.command()
@click.option(
    "--record",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Each measurement is added to it as a line of JSON.",
)
@click.option("--commit", default="unknown", help="What is measured; told above the tables.")
@click.option("--tune", is_flag=True, help="Try other warps, stages and cuts, too.")
@click.option("--tiny", is_flag=True, help="Sizes for Triton's interpreter: numbers mean nothing.")
def main(path: Path | None, commit: str, *, tune: bool, tiny: bool) -> None:
    """Measure the attention of one layer on the GPU, and print tables as Markdown."""
    if not tiny and not torch.cuda.is_available():
        click.echo("benchmarks.gpu_attention: torch finds no CUDA device here", err=True)
        sys.exit(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = None if path is None else LineFile(path)
    rows = []
    for row in measure(TINY if tiny else LLAMA_3_8B, device, commit, tune=tune):
        rows.append(row)
        click.echo(f"{row}", err=True)
        if lines is not None:
            lines.add(row)
    click.echo(markdown(rows))


if __name__ == "__main__":
    main()
