"""The command that trains the embedded model: `python -m training`, or `make train`."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from training.export import save_model
from training.loop import Training, open_training
from training.run_folder import Measured, RunFolder, RunFolderError
from training.shape import Schedule, Shape
from training.text import read_corpus, tokenizer_texts
from training.tokenizer import save_tokenizer, train_tokenizer

Options = TypeVar("Options", Shape, Schedule)

_LINES = (
    ("held_out", "held-out text", "#1f5f8b"),
    ("text", "training text", "#8fb8d6"),
    ("held_out_answer", "held-out answers", "#d9822b"),
    ("answer", "training answers", "#f0c491"),
    ("repeat", "repeated random segments", "#777777"),
)


@click.command()
@click.option("--run", type=click.Path(path_type=Path), default=Path("build/embedded_model"))
@click.option("--steps", type=click.IntRange(min=1), default=Schedule.steps, show_default=True)
@click.option(
    "--polish-steps",
    type=click.IntRange(min=0),
    default=Schedule.polish_steps,
    show_default=True,
    help="Behind the others, on mostly needles.",
)
@click.option("--seed", type=int, default=Schedule.seed, show_default=True)
@click.option(
    "--windows-per-step",
    type=click.IntRange(min=1),
    default=Schedule.windows_per_step,
    show_default=True,
)
@click.option("--planted/--not-planted", default=Schedule.planted, show_default=True)
@click.option(
    "--bias/--no-bias",
    "qkv_bias",
    default=Shape.qkv_bias,
    show_default=True,
    help="On q, k and v.",
)
@click.option("--hidden", type=int, default=Shape.hidden, show_default=True)
@click.option("--layers", type=int, default=Shape.layers, show_default=True)
@click.option("--heads", type=int, default=Shape.heads, show_default=True)
@click.option("--intermediate", type=int, default=Shape.intermediate, show_default=True)
@click.option("--rope-theta", type=float, default=Shape.rope_theta, show_default=True)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Two are not twice as fast, and their sums are not those of one.",
)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=shutil.which("g++") is not None,
    help="With torch.compile, about twice as fast; needs a C++ compiler.",
)
def main(run: Path, threads: int, *, compiled: bool, **learning: Any) -> None:
    """Train the embedded model in the folder --run, or resume the run that it holds."""
    torch.set_num_threads(threads)
    shape = _of(Shape, learning)
    schedule = _of(Schedule, learning)
    click.echo("reading Python's library", err=True)
    tokenizer = train_tokenizer(tokenizer_texts(), shape.vocab)
    corpus = read_corpus(tokenizer)
    click.echo(f"tokens: {corpus.num_tokens}", err=True)
    try:
        training = open_training(
            corpus, shape, schedule, RunFolder(run, shape, schedule), compiled=compiled
        )
    except RunFolderError as error:
        click.echo(f"training: {error}", err=True)
        sys.exit(2)
    _train(training, schedule.all_steps)
    model = run / "model"
    save_model(training.network, model)
    save_tokenizer(tokenizer, model, shape.native_len)
    history = training.progress.history
    (run / "losses.json").write_text(json.dumps([asdict(each) for each in history], indent=1))
    _plot_losses(history, run / "losses.png")
    click.echo(f"{model}: held-out loss {history[-1].held_out:.3f} nats per token", err=True)


def _of(kind: Callable[..., Options], learning: dict[str, Any]) -> Options:
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in learning.items() if name in names})


def _train(training: Training, steps: int) -> None:
    done = training.progress.step
    if done:
        click.echo(f"going on behind step {done} of {steps}", err=True)
    with click.progressbar(length=steps, label="training", file=sys.stderr) as bar:
        bar.update(done)
        for measured in training.steps():
            bar.update(1)
            if measured is not None:
                click.echo("\n" + _line(measured), err=True)


def _line(measured: Measured) -> str:
    rate = measured.num_tokens / measured.seconds
    return (
        f"step {measured.step}  {measured.num_tokens / 1e6:.2f} M tokens  {rate:.0f} tokens/s  "
        f"text {measured.text:.3f}  answers {measured.answer:.3f}  repeats {measured.repeat:.3f}  "
        f"held out {measured.held_out:.3f}, answers {measured.held_out_answer:.3f}"
    )


def _plot_losses(history: Sequence[Measured], path: Path) -> None:
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


if __name__ == "__main__":
    main()
