"""`python -m benchmarks.cpu.thread_shares`: how evenly the products of a Llama divide over threads.

Nothing is measured. A step of few rows gives each thread as many panels of a product as any other,
within one (fused_decode.py). More rows are cut into parts that threads take when they are free
(skinny_gemm.py). A product lasts as long as its busiest thread. The table has how many times faster
than one thread all products of the model are by that alone: memory, barriers and attention are left
out.
"""

import click

from benchmarks.models.llama import SHAPES, Shape
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import PANEL
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import MOST_ROWS, part_sizes

_THREADS = (1, 2, 16, 64)
_ROWS = (1, 64, 512)


def products_of(shape: Shape) -> list[tuple[int, int]]:
    """Return the outputs and inputs of a model's products; those of one operand are one."""
    heads, kv_heads = (each * shape.head_dim for each in (shape.heads, shape.kv_heads))
    layer = [
        (heads + 2 * kv_heads, shape.hidden),
        (shape.hidden, heads),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]
    return [*layer * shape.layers, (shape.vocab, shape.hidden)]


def busiest(num_outputs: int, num_rows: int, num_threads: int) -> float:
    """Return the share of a product that its busiest thread computes."""
    num_panels = -(-num_outputs // PANEL)
    if num_rows <= MOST_ROWS:  # one call for the step
        return -(-num_panels // num_threads) / num_panels
    rows, panels = part_sizes(num_rows, num_panels, num_threads)
    num_parts = -(-num_rows // rows) * -(-num_panels // panels)
    whole = -(-num_parts // num_threads) * rows * panels
    return min(1.0, whole / (num_rows * num_panels))


def times_faster(shape: Shape, num_rows: int, num_threads: int) -> float:
    """Return the time of all products on one thread over that on several."""
    products = products_of(shape)
    alone = sum(outputs * inputs for outputs, inputs in products)
    divided = sum(
        outputs * inputs * busiest(outputs, num_rows, num_threads) for outputs, inputs in products
    )
    return alone / divided


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1b", show_default=True)
def main(shape: str) -> None:
    """Print the table of a shape."""
    click.echo("| threads | " + " | ".join(f"{rows} rows" for rows in _ROWS) + " |")
    click.echo("|---:|" + "---:|" * len(_ROWS))
    for threads in _THREADS:
        cells = [f"{times_faster(SHAPES[shape], rows, threads):.1f}" for rows in _ROWS]
        click.echo(f"| {threads} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
