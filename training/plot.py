"""A plot of the losses of a run."""

from collections.abc import Sequence
from pathlib import Path

from training.run_folder import Measured

_LINES = (
    ("held_out", "held-out text", "#1f5f8b"),
    ("text", "training text", "#8fb8d6"),
    ("held_out_answer", "held-out answers", "#d9822b"),
    ("answer", "training answers", "#f0c491"),
    ("repeat", "repeated random segments", "#777777"),
)


def plot_losses(history: Sequence[Measured], path: Path) -> None:
    """Draw nats per token against millions of tokens; the path's suffix is the format."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    millions = [each.num_tokens / 1e6 for each in history]
    for name, label, colour in _LINES:
        axes.plot(millions, [getattr(each, name) for each in history], label=label, color=colour)
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("loss, nats per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
