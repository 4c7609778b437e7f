"""The report on whole models: Markdown tables, and plots."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.report import Column, Row, ceilings_line, machine_line, table
from ropewalk.studies.harness.plotting import (
    COLOURS,
    PlotError,
    check_can_plot,
    label_logarithmic,
    length_ticks,
    milliseconds_text,
    tidy,
    use_log_scale,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = "ropewalk"

_DECODE: tuple[Column, ...] = (
    ("sequences", lambda row: str(row["sequences"])),
    ("", lambda row: row["who"]),
    ("rounds", lambda row: str(row["rounds"])),
    ("tokens/s", lambda row: f"{row['tokens_s']:,.0f}"),
    ("ropewalk is so many times faster", lambda row: _number(row["ratio"], "{:.2f}")),
    ("first round", lambda row: _number(row["first"].get("tokens_s"), "{:,.0f}")),
    ("ms a step", lambda row: _ms(row["step_s"])),
    ("of it the device", lambda row: _ms(row.get("device_s"))),
    ("weights / step, share of copy", lambda row: _number(row["share_of_copy"], "{:.1%}")),
)
_PREFILL: tuple[Column, ...] = (
    ("tokens", lambda row: f"{row['tokens']:,}"),
    ("chunks of", lambda row: f"{row['chunk']:,}"),
    ("s", lambda row: f"{row['seconds']:.4g}"),
    ("s, first round", lambda row: _number(row["first"].get("seconds"), "{:.4g}")),
    ("share of matrix rate", lambda row: f"{row['share_of_matrix']:.1%}"),
)
_FIRST_TOKEN: tuple[Column, ...] = (
    ("context", lambda row: f"{row['context']:,}"),
    ("ms to the first token", lambda row: _ms(row["seconds"])),
    ("first round", lambda row: _ms(row["first"].get("seconds"))),
)
_STEPS: tuple[Column, ...] = (
    ("steps", lambda row: f"{row['steps']:g}"),
    ("ms a step", lambda row: _ms(row.get("step_s"))),
    ("of it the device", lambda row: _ms(row.get("device_s"))),
    ("ms a step, first round", lambda row: _ms(row["first"].get("step_s"))),
)
_BURST: tuple[Column, ...] = (
    ("prompts", lambda row: str(row["prompts"])),
    ("tokens each", lambda row: f"{row['tokens']:,}"),
    ("ms to the last first token", lambda row: _ms(row["seconds"])),
    ("first round", lambda row: _ms(row["first"].get("seconds"))),
    ("prompt tokens/s", lambda row: f"{row['prompt_tokens_s']:,.0f}"),
)
_SHORT_PROMPTS: tuple[Column, ...] = (
    ("tokens", lambda row: f"{row['tokens']:,}"),
    ("behind", lambda row: f"{row['context']:,}"),
    ("ms to the first token, captured", lambda row: _ms(row["captured_s"])),
    ("queued", lambda row: _ms(row["queued_s"])),
    ("queued / captured", lambda row: f"{row['queued_s'] / row['captured_s']:.2f}"),
)
_ARRIVALS: tuple[Column, ...] = (
    ("requests", lambda row: str(row["requests"])),
    ("s between them", lambda row: f"{row['gap_s']:g}"),
    ("tokens/s", lambda row: f"{row['tokens_s']:,.0f}"),
    ("mixed steps", lambda row: f"{row['steps']:g}"),
    *_STEPS[1:],
)
_SAMPLING: tuple[Column, ...] = (
    ("setting", lambda row: row["setting"]),
    ("sequences", lambda row: str(row["sequences"])),
    *_STEPS,
)
_DRAFTS: tuple[Column, ...] = (
    ("sequences", lambda row: str(row["sequences"])),
    ("tokens/s without drafts", lambda row: f"{row['plain_tokens_s']:,.0f}"),
    ("with", lambda row: f"{row['drafted_tokens_s']:,.0f}"),
    ("ratio", lambda row: f"{row['drafted_tokens_s'] / row['plain_tokens_s']:.2f}"),
    ("right tokens of drafts", lambda row: f"{row['accepted']:.0%}"),
    ("equal answers", lambda row: f"{row['equal']:.0%}"),
)
_WINDOWS: tuple[Column, ...] = (
    ("context", lambda row: f"{row['context']:,}"),
    ("sequences", lambda row: str(row["sequences"])),
    *_STEPS,
)
_FEW_BITS: tuple[Column, ...] = (
    ("context", lambda row: f"{row['context']:,}"),
    ("sequences", lambda row: str(row["sequences"])),
    ("cache", lambda row: row["kind"]),
    *_STEPS,
    ("s to the last first token", lambda row: f"{row['first_token_s']:.4g}"),
)
_QUEUED: tuple[Column, ...] = (
    ("decodes", lambda row: str(row["decodes"])),
    ("tokens of the prompt", lambda row: f"{row['tokens']:,}"),
    ("ms to queue the step", lambda row: _ms(row["queueing_s"])),
    ("ms until it has run", lambda row: _ms(row["step_s"])),
)
_MEMORY: tuple[Column, ...] = (
    ("GiB, told before", lambda row: f"{row['told_bytes'] / 2**30:.2f}"),
    ("peak", lambda row: f"{row['peak_bytes'] / 2**30:.2f}"),
    ("outside, told before", lambda row: f"{row['told_outside_bytes'] / 2**30:.2f}"),
    ("outside", lambda row: f"{row['outside_bytes'] / 2**30:.2f}"),
)
_GROWTH: tuple[Column, ...] = (
    ("tier ends at", lambda row: f"{row['ceiling']:,}"),
    ("ms, the step that crosses", lambda row: _ms(row["crossing_s"])),
    ("ms, median step", lambda row: _ms(row["step_s"])),
    ("ms, slowest other", lambda row: _ms(row["slowest_step_s"])),
)
_SERVER_BENCH: tuple[Column, ...] = (
    ("in flight", lambda row: str(row["concurrency"])),
    ("context", lambda row: f"{row['context']:,}"),
    ("ms to the first token, p50", lambda row: _ms(row["first_token_p50_s"])),
    ("p95", lambda row: _ms(row["first_token_p95_s"])),
    ("ms between tokens, p50", lambda row: _ms(row["next_token_p50_s"])),
    ("p95", lambda row: _ms(row["next_token_p95_s"])),
    ("output tokens/s", lambda row: f"{row['output_tokens_s']:,.0f}"),
)
_SERVER_METRICS: tuple[Column, ...] = (
    ("in flight", lambda row: str(row["concurrency"])),
    ("context_bucket", lambda row: row["context_bucket"]),
    ("requests", lambda row: str(row["first_token_count"])),
    ("ms to the first token, mean", lambda row: _ms(row["first_token_mean_s"])),
    ("p50", lambda row: _ms(row["first_token_p50_s"])),
    ("gaps", lambda row: str(row["next_token_count"])),
    ("ms between tokens, mean", lambda row: _ms(row["next_token_mean_s"])),
    ("p50", lambda row: _ms(row["next_token_p50_s"])),
)


def _ms(seconds: float | None) -> str:
    return _number(None if seconds is None else seconds * 1e3, "{:.4g}")


def _number(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)


def report(rows: Sequence[Row], pictures: Sequence[Path]) -> str:
    """Build the report of a run, complete or not, with its reasons for missing measurements."""
    (machine,) = _of(rows, "machine")
    paragraphs = [machine_line(machine)]
    paragraphs += [ceilings_line(row) for row in _of(rows, "ceilings")]
    paragraphs += [_counted_line(row) for row in _of(rows, "counted")]
    attentions = [f"{row['who']}: {row['attention']}" for row in _of(rows, "contender")]
    sections: tuple[tuple[str, Sequence[Row], Sequence[Column]], ...] = (
        ("Decode", _decode_rows(rows), _DECODE),
        ("Prefill", _medians(_of(rows, "prefill"), ("tokens", "chunk")), _PREFILL),
        ("Time to the first token", first_tokens(rows), _FIRST_TOKEN),
        ("Bursts of prompts", _medians(_of(rows, "burst"), ("tokens", "prompts")), _BURST),
        (
            "Short prompts",
            _medians(_of(rows, "short_prompt"), ("tokens", "context")),
            _SHORT_PROMPTS,
        ),
        ("Steps with answers and prompts", _medians(_of(rows, "arrivals"), ()), _ARRIVALS),
        ("Settings of sampling", _medians(_of(rows, "sampling"), ("setting",)), _SAMPLING),
        ("Drafts", _medians(_of(rows, "drafts"), ("sequences",)), _DRAFTS),
        ("Windows", _medians(_of(rows, "windows"), ("context", "sequences")), _WINDOWS),
        (
            "Keys and values in few bits",
            sorted(
                _medians(_of(rows, "few_bits"), ("context", "sequences", "kind")),
                key=lambda row: (row["context"], row["sequences"]),
            ),
            _FEW_BITS,
        ),
        ("A step that is not captured", _of(rows, "queued"), _QUEUED),
        ("Memory", _of(rows, "memory"), _MEMORY),
        ("A tier change", _medians(_of(rows, "growth"), ("ceiling",)), _GROWTH),
        ("The server, as its clients see it", _of(rows, "server_bench"), _SERVER_BENCH),
        ("The server, from /metrics", _of(rows, "server_metrics"), _SERVER_METRICS),
    )
    for title, found, columns in sections:
        if found:
            paragraphs += [f"### {title}", table(found, columns)]
            if title == "Decode" and attentions:
                paragraphs.append(f"Attention of transformers' batching: {'; '.join(attentions)}.")
    paragraphs += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    missing = [f"- {row['what']}: {row['why']}" for row in _of(rows, "left_out")]
    if missing:
        paragraphs += ["### Left out", "\n".join(missing)]
    return "\n\n".join(paragraphs)


def _counted_line(counted: Row) -> str:
    return (
        f"Counted: a decode step reads {counted['step_bytes'] / 1e9:.4g} GB of weights; a prompt "
        f"of {counted['prefill_len']:,} tokens takes {counted['prefill_operations'] / 1e12:.4g} "
        "T operations."
    )


def _of(rows: Iterable[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _medians(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return one row for all rounds with equal keys, with the medians of their floats."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [_median_row(members) for members in groups.values()]


def _median_row(members: Sequence[Row]) -> Row:
    """Return medians of all rounds but the first, which may compile; it stands under "first"."""
    first = [row for row in members if row.get("round") == 0]
    later = [row for row in members if row.get("round") != 0] or members
    medians = {
        name: median(row[name] for row in later if row.get(name) is not None)
        for name, value in later[0].items()
        if isinstance(value, float)
    }
    is_apart = len(later) < len(members)
    return {**later[0], **medians, "rounds": len(later), "first": first[0] if is_apart else {}}


def first_tokens(rows: Sequence[Row]) -> list[Row]:
    found = _medians(_of(rows, "first_token"), ("context",))
    return sorted(found, key=lambda row: int(row["context"]))


def _decode_rows(rows: Sequence[Row]) -> list[Row]:
    """Return medians by contender; ratios are taken between rounds of one number."""
    decodes = _of(rows, "decode")
    ours = {
        (row["sequences"], row["round"]): row["tokens_s"] for row in decodes if row["who"] == _OURS
    }
    found = []
    for row in _medians(decodes, ("sequences", "who")):
        ratios = [
            ours[each["sequences"], each["round"]] / each["tokens_s"]
            for each in decodes
            if (each["sequences"], each["who"]) == (row["sequences"], row["who"])
            and (each["sequences"], each["round"]) in ours
            and (each["round"] > 0 or row["rounds"] == 1)
        ]
        ratio = median(ratios) if ratios and row["who"] != _OURS else None
        found.append({"step_s": None, "share_of_copy": None, **row, "ratio": ratio})
    return sorted(found, key=lambda row: (row["sequences"], row["ratio"] or 0.0))


_MARKERS = "os^vD"  # of curves, which may be more than the colours

# The label of a curve, and (context, seconds) of its points.
_Curve = tuple[str, Sequence[tuple[float, float]]]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every plot that has points, and return the paths; without matplotlib there are none."""
    drawn = []
    for name, curves, ylabels in (
        ("gpu_first_token.png", _first_token_curves(rows), ("time to first token",)),
        (
            "gpu_server.png",
            _server_curves(rows),
            ("time to first token", "inter-token latency (ms)"),
        ),
    ):
        path = folder / name
        try:
            check_can_plot(path)
        except PlotError:
            return []
        if any(points for panel in curves for _, points in panel):
            _draw(path, curves, ylabels)
            drawn.append(path)
    return drawn


def _first_token_curves(rows: Sequence[Row]) -> list[list[_Curve]]:
    points = [(row["context"], row["seconds"]) for row in first_tokens(rows)]
    return [[("engine", points)]]


def _server_curves(rows: Sequence[Row]) -> list[list[_Curve]]:
    """Return curves from /metrics per number in flight; a bucket is at its upper bound."""
    found = _of(rows, "server_metrics")
    in_flight = sorted({int(row["concurrency"]) for row in found})

    def points(what: str, count: int) -> list[tuple[float, float]]:
        return [
            (float(row["context_bucket"]), row[what])
            for row in found
            if row["concurrency"] == count
            and row[what] is not None
            and row["context_bucket"] != "+Inf"
        ]

    return [
        [(f"{count} in flight", points(what, count)) for count in in_flight]
        for what in ("first_token_mean_s", "next_token_mean_s")
    ]


def _draw(path: Path, panels: Sequence[Sequence[_Curve]], ylabels: Sequence[str]) -> None:
    # matplotlib is optional, and slow to import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 1 + 3 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    lens = sorted({context for curves in panels for _, points in curves for context, _ in points})
    for axes, curves, ylabel in zip(all_axes, panels, ylabels, strict=True):
        _draw_panel(axes, curves)
        axes.set_ylabel(ylabel)
    # First tokens take from milliseconds to many seconds. Inter-token latencies differ less.
    firsts = [1e3 * seconds for _, points in panels[0] for _, seconds in points if seconds > 0]
    if firsts:
        use_log_scale([all_axes[0]], firsts, milliseconds_text)
        all_axes[0].set_ylabel(f"{ylabels[0]}\n(log scale)")
    for axes in all_axes[1:]:
        axes.set_ylim(bottom=0)
    last = all_axes[-1]
    last.set_xscale("log", base=2)
    ticks = length_ticks(lens)
    label_logarithmic(last.xaxis, ticks, [f"{tick:,.0f}" for tick in ticks])
    last.set_xlabel("context length (tokens, log scale)")
    figure.align_ylabels()
    figure.savefig(path, dpi=150)


def _draw_panel(axes: "Axes", curves: Sequence[_Curve]) -> None:
    for index, (label, points) in enumerate(curves):
        contexts = [context for context, _ in points]
        times = [1e3 * seconds for _, seconds in points]
        colour, marker = COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)]
        axes.plot(contexts, times, color=colour, marker=marker, label=label)
    tidy(axes)
    if len(curves) > 1:
        axes.legend(frameon=False)
