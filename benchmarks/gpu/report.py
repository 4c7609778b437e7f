"""The report on the GPU's attention: Markdown tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# The heading of a column, and a function from a row to its cell.
Column = tuple[str, Callable[[Row], str]]

_DECODE: tuple[Column, ...] = (
    ("sequences x context", lambda row: row["batch"]),
    ("GB read", lambda row: f"{row['bytes'] / 1e9:.3g}"),
    ("ms", lambda row: f"{row['seconds'] * 1e3:.4g}"),
    ("share of copy", lambda row: f"{row['share_of_copy']:.1%}"),
    ("ms, rotated at write", lambda row: f"{row['rotated_seconds'] * 1e3:.4g}"),
    ("at read / at write", lambda row: f"{row['over_rotated']:.3f}"),
    ("ms, first call", lambda row: f"{row['first_s'] * 1e3:.4g}"),
)
_ROWS: tuple[Column, ...] = (
    ("sequences x tokens", lambda row: row["batch"]),
    ("ms", lambda row: f"{row['seconds'] * 1e3:.4g}"),
    ("ms, each token alone", lambda row: f"{row['alone_seconds'] * 1e3:.4g}"),
    ("together / alone", lambda row: f"{row['over_alone']:.3f}"),
)
_PREFILL: tuple[Column, ...] = (
    ("tokens", lambda row: f"{row['tokens']:,}"),
    ("context", lambda row: f"{row['context']:,}"),
    ("attention", lambda row: row["kernel"]),
    ("ms", lambda row: f"{row['seconds'] * 1e3:.4g}"),
    ("share of matrix rate", lambda row: f"{row['share_of_matrix']:.1%}"),
    ("ms, first call", lambda row: f"{row['first_s'] * 1e3:.4g}"),
    ("kernels", lambda row: "; ".join(row["names"]) or "not on a GPU"),
)
_TUNING: tuple[Column, ...] = (
    ("context", lambda row: f"{row['context']:,}"),
    ("sequences", lambda row: str(row["sequences"])),
    ("warps", lambda row: str(row["num_warps"])),
    ("stages", lambda row: str(row["num_stages"])),
    ("programs", lambda row: str(row["programs_per_processor"])),
    ("share of copy", lambda row: f"{row['share_of_copy']:.1%}"),
)
_POSITIONS: tuple[Column, ...] = (
    ("method", lambda row: row["method"]),
    ("read", lambda row: row["read"]),
    ("ms", lambda row: f"{row['seconds'] * 1e3:.4g}"),
    ("over native", lambda row: f"{row['over_native']:.3f}"),
    ("ms, first call", lambda row: f"{row['first_s'] * 1e3:.4g}"),
    ("difference to the reference", lambda row: f"{row['error']:.2g}"),
)
_PARTS = (
    *(("decode", _DECODE), ("rows", _ROWS), ("prefill", _PREFILL), ("tuning", _TUNING)),
    ("positions", _POSITIONS),
)


def markdown(rows: Sequence[Row]) -> str:
    """Build the tables of one run, below lines about the machine and its rates."""
    (machine,) = (row for row in rows if row["part"] == "machine")
    (ceilings,) = (row for row in rows if row["part"] == "ceilings")
    (angles,) = (row for row in rows if row["part"] == "angles")
    (error,) = (row for row in rows if row["part"] == "error")
    paragraphs = [
        machine_line(machine),
        f"{ceilings_line(ceilings)} Cosines near position {angles['position']:,}: off by "
        f"{angles['cosine_error']:.2g}, transformers' by "
        f"{angles['transformers_cosine_error']:.2g}. Difference to the reference read: "
        f"{error['decode']:.2g} in decode, {error['prefill']:.2g} in prefill.",
    ]
    for part, columns in _PARTS:
        of_part = [row for row in rows if row["part"] == part]
        if of_part:
            paragraphs.append(table(of_part, columns))
    return "\n\n".join(paragraphs)


def machine_line(machine: Row) -> str:
    """Build the line with the date, the commit, the device and the versions."""
    return (
        f"{machine['date']}, commit `{machine['commit']}`; {machine['device']}; torch "
        f"{machine['torch']}, triton {machine['triton']}, transformers {machine['transformers']}, "
        f"Python {machine['python']}."
    )


def ceilings_line(ceilings: Row) -> str:
    """Build the line with the machine's own rates."""
    return (
        f"Ceilings: copy {ceilings['copy_bytes_s'] / 1e12:.3g} TB/s, read "
        f"{ceilings['read_bytes_s'] / 1e12:.3g} TB/s, bf16 product "
        f"{ceilings['matrix_flop_s'] / 1e12:.4g} TFLOP/s in a burst, "
        f"{ceilings['sustained_flop_s'] / 1e12:.4g} sustained."
    )


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Build a Markdown table with one line per row."""
    lines = [
        [head for head, _ in columns],
        ["---:"] * len(columns),
        *([cell(row) for _, cell in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
