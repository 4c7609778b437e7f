"""`python -m benchmarks.gpu.model`: a whole model on a GPU, beside transformers.

The measurements are described in gpu.md. The model has the shape of Llama 3 8B and random weights.
Its times are also compared with the GPU's own rates.
"""

import sys
import time
import traceback
from pathlib import Path

import click
import torch

from benchmarks.gpu.attention import ceilings, machine
from benchmarks.gpu.engine import free_memory
from benchmarks.gpu.model_inputs import LLAMA_3_8B, TINY, ModelSizes
from benchmarks.gpu.model_report import draw, report
from benchmarks.gpu.parts import PARTS, Bench, Row, left_out
from ropewalk.studies.harness.jsonl_file import LineFile


class _Record:
    """Rows, on disk as soon as they are added; the report and the plots after every part."""

    has_failed = False  # whether a part ended with an error

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines = LineFile(folder / "gpu_model.jsonl")
        self._rows: list[Row] = []
        self._begin = time.monotonic()

    def add(self, row: Row) -> None:
        """Append a row with its time in seconds from the start."""
        row = {**row, "at_s": round(time.monotonic() - self._begin, 1)}
        self._rows.append(row)
        self._lines.add(row)
        click.echo(f"{row}", err=True)

    def write(self) -> str:
        """Write the plots and the report of all rows so far; return the report's text."""
        pictures = draw(self._rows, self.folder)
        text = report(self._rows, pictures)
        (self.folder / "gpu_model.md").write_text(text + "\n", encoding="utf-8")
        return text


def measure(
    sizes: ModelSizes, device: torch.device, record: _Record, parts: list[str], end: float
) -> None:
    """Run every part in turn; a part that fails is recorded, and the next one runs."""
    rates = ceilings(sizes, device)
    copy, matrix = rates["copy_bytes_s"], rates["matrix_flop_s"]
    record.add({"part": "ceilings", **rates})
    counted = {
        "step_bytes": sizes.step_bytes,
        "prefill_len": sizes.prefill_len,
        "prefill_operations": sizes.prefill_operations(sizes.prefill_len),
    }
    record.add({"part": "counted", **counted})
    free_memory()
    bench = Bench(sizes, device, copy, matrix, end, record.folder, sizes is TINY)
    for name in parts:
        if not bench.has_time():
            record.add(left_out(name, "no time was left"))
            continue
        try:
            for row in PARTS[name](bench):
                record.add(row)
        except Exception as error:  # noqa: BLE001  # the other parts still run
            traceback.print_exc()
            record.add(left_out(name, f"{type(error).__name__}: {error}"[:500]))
            record.has_failed = True
        free_memory()
        record.write()


@click.command()
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build"),
    show_default=True,
    help="Folder of gpu_model.jsonl (added to), gpu_model.md and pictures.",
)
@click.option(
    "--parts",
    "named",
    default=",".join(PARTS),
    show_default=True,
    help="Which, and in which order.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=480,
    show_default=True,
    help="No new measurement begins after so long.",
)
@click.option("--commit", default="unknown", help="The measured commit; told above the tables.")
@click.option("--tiny", is_flag=True, help="Sizes for a CPU: numbers mean nothing.")
def main(folder: Path, named: str, seconds: float, commit: str, *, tiny: bool) -> None:
    """Measure a model of random weights on the GPU; write rows, a report and plots.

    Ends with code 1 if a part failed, 2 if there is no GPU.
    """
    begin = time.monotonic()
    parts = named.split(",")
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise click.BadParameter(
            f"{unknown[0]} is none of {', '.join(PARTS)}", param_hint="--parts"
        )
    if not tiny and not torch.cuda.is_available():
        click.echo("benchmarks.gpu.model: torch finds no CUDA device here", err=True)
        sys.exit(2)
    device = torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device())
    folder.mkdir(parents=True, exist_ok=True)
    record = _Record(folder)
    record.add({"part": "machine", **machine(device, commit)})
    measure(TINY if tiny else LLAMA_3_8B, device, record, parts, begin + seconds)
    click.echo(record.write())
    if record.has_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
