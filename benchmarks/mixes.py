"""`python -m benchmarks.mixes FILE.gguf...`: the memory of each file's weights beside its size.

A file is loaded as `ropewalk serve` loads it on a CPU, self-check and all. Its products then say
which formats they hold, and whether the forward of plain decoders was kept.
"""

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import click
import torch

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
from ropewalk.model_runtime.layers.merged_linear import is_linear
from ropewalk.model_runtime.layers.packed_linear import products_of
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.low_bits.hold import return_freed_memory

_MIB = 1 << 20


def row_of(path: Path, loaded: Checkpoint) -> list[str]:
    """Return the cells of a file's row."""
    model: Any = loaded.model
    products = products_of(model)
    panels = {id(weight.memory): weight for each in products for weight in each.weights}
    embedding = model.get_input_embeddings()
    if hasattr(embedding, "panels"):
        panels[id(embedding.panels.memory)] = embedding.panels
    kinds: Counter[str] = Counter()
    for each in panels.values():
        kinds[each.kind.name] += each.memory.nbytes
    floats = sum(each.nbytes for each in model.parameters() if each.device.type == "cpu")
    packed = [each for each in products if not each.weights]
    floats += sum(each._panels.num_bytes for each in packed if each._panels is not None)  # noqa: SLF001
    file_bytes, held = path.stat().st_size, kinds.total() + floats
    num_float = len(packed) + sum(map(is_linear, model.modules()))
    is_fused = isinstance(vars(model).get("forward"), DecoderLayers)
    one_call = is_fused and vars(model)["forward"].multiplying is not None
    return [
        path.name,
        ", ".join(name for name, _ in kinds.most_common()),
        f"{file_bytes / _MIB:.1f}",
        f"{kinds.total() / _MIB:.1f}",
        f"{floats / _MIB:.1f}",
        f"{held / file_bytes:.3f}",
        "all" if not num_float and FLOAT32.name not in kinds else f"all but {num_float}",
        ("one call" if one_call else "layer by layer") if is_fused else "its own",
    ]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Load GGUF files one after the other; sizes are in MiB."""
    torch.set_num_threads(1)
    click.echo(
        "| file | formats | file | panels | floats | both / file | linears in few bits "
        "| forward |\n|---|---|---:|---:|---:|---:|---|---|"
    )
    for path in files:
        loaded = load_checkpoint(path, dtype="float32", device="cpu")
        click.echo(f"| {' | '.join(row_of(path, loaded))} |")
        del loaded
        gc.collect()
        return_freed_memory()


if __name__ == "__main__":
    main()
