"""Weights as training leaves them and small random models lack, drawn by a seed.

Each kind below was seen in trained checkpoints or is their extreme: exact zeros in norms, untrained
embeddings, equal heads, outlier channels, layers that add nothing. `adversarial` draws a few kinds
for one model. `python -m tests.checkpoints.adversarial_weights` loads many such models and counts
those that are refused.
"""

import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import structlog
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import prepare_model
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.tokens import byte_tokenizer
from tests.models_page import SERVED

_NEAR = 0.3  # share of the allowance that is worth a look
Change = Callable[[nn.Module, random.Random], None]


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


def _named(model: nn.Module, *parts: str) -> list[nn.Linear]:
    """The linears of layers whose name has one of these parts."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(part in name for part in parts)
    ]


def _norms(model: nn.Module) -> list[Tensor]:
    """The vectors of a model, but for biases and decays.

    A decay of exp(60) a token is left out: transformers sums decays over a chunk, and beside such a
    sum all others are rounded away. The recurrent formula in float64 agrees with the server there.
    """
    left_out = ("bias", "A_log")
    return [
        each
        for name, each in model.named_parameters()
        if each.dim() == 1 and not any(part in name for part in left_out)
    ]


def _embedding(model: Any) -> Tensor:
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def _some(numbers: Tensor, share: float, rng: random.Random) -> Tensor:
    """A mask over numbers; the first one is in it."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    mask = torch.rand(numbers.shape, generator=generator) < share
    mask.view(-1)[0] = True
    return mask


def norms_with_zeros(model: nn.Module, rng: random.Random) -> None:
    """Zeros in an eighth of every norm, in its first dimension too, as in Gemma 3."""
    for norm in _norms(model):
        norm[_some(norm, 0.12, rng)] = 0.0


def norms_minus_one(model: nn.Module, rng: random.Random) -> None:
    """-1, which makes a dimension zero where one is added to a norm."""
    for norm in _norms(model):
        norm[_some(norm, 0.12, rng)] = -1.0


def large_norms(model: nn.Module, rng: random.Random) -> None:
    """Norms of about 60, beside which an added one is less than bfloat16 rounds."""
    for norm in rng.sample(_norms(model), min(2, len(_norms(model)))):
        norm.add_(60.0)


def empty_embeddings(model: nn.Module, rng: random.Random) -> None:
    """Zeros for the first ids, which are often special or unused."""
    _embedding(model)[: rng.choice((24, 120))] = 0.0


def equal_embeddings(model: nn.Module, rng: random.Random) -> None:
    """One row for the first ids."""
    rows = _embedding(model)
    rows[: rng.choice((24, 120))] = rows[150].clone()


def zero_head(model: nn.Module, rng: random.Random) -> None:
    """The first half of a projection's outputs is zero."""
    for linear in _named(model, "q_proj", "k_proj", "query", "qkv"):
        if rng.random() < 0.5:
            linear.weight[: max(1, len(linear.weight) // 2)] = 0.0


def equal_heads(model: nn.Module, rng: random.Random) -> None:
    """Every second half of a projection's rows equals the first."""
    for linear in _named(model, "proj", "query", "dense"):
        half = len(linear.weight) // 2
        if rng.random() < 0.3:
            linear.weight[half : 2 * half] = linear.weight[:half].clone()


def silent_layers(model: nn.Module, rng: random.Random) -> None:
    """Some of the linears are zero, the first one of a kind often among them."""
    for linear in _linears(model):
        if rng.random() < 0.3:
            linear.weight.zero_()


def grid(model: nn.Module, rng: random.Random) -> None:
    """All numbers are multiples of 1/64, so that sums in any order are equal."""
    for parameter in model.parameters():
        parameter.copy_((parameter * 64).round() / 64)


def outlier_rows(model: nn.Module, rng: random.Random) -> None:
    """Two rows of projections are 300 times larger."""
    for linear in _named(model, "proj", "query", "dense"):
        linear.weight[:2] *= 300.0


def outlier_channel(model: nn.Module, rng: random.Random) -> None:
    """One channel of the embedding is 10,000 times larger."""
    rows = _embedding(model)
    rows[:, rng.randrange(rows.shape[1])] *= 1e4


def outlier_norm(model: nn.Module, rng: random.Random) -> None:
    """One dimension of a norm is 10,000."""
    norm = rng.choice(_norms(model) or [_embedding(model)[0]])
    norm[rng.randrange(len(norm))] = 1e4


def negative_zeros(model: nn.Module, rng: random.Random) -> None:
    """-0 in a tenth of everything."""
    for parameter in model.parameters():
        parameter[_some(parameter, 0.1, rng)] = -0.0


def subnormals(model: nn.Module, rng: random.Random) -> None:
    """Numbers that are smaller than the smallest normal one."""
    for parameter in model.parameters():
        parameter[_some(parameter, 0.1, rng)] = 1e-40


def tiny_projections(model: nn.Module, rng: random.Random) -> None:
    """Gates so small that silu and gelu are nearly equal."""
    for linear in _named(model, "gate"):
        linear.weight.mul_(1e-4)


KINDS: tuple[Change, ...] = (
    norms_with_zeros,
    norms_minus_one,
    large_norms,
    empty_embeddings,
    equal_embeddings,
    zero_head,
    equal_heads,
    silent_layers,
    grid,
    outlier_rows,
    outlier_channel,
    outlier_norm,
    negative_zeros,
    subnormals,
    tiny_projections,
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model of a seed, and what was changed in it."""

    model: Any
    kinds: tuple[str, ...]
    dtype: torch.dtype


@torch.no_grad()
def change(model: Any, seed: int, kinds: tuple[Change, ...] = ()) -> tuple[str, ...]:
    """Change a model's weights in place by one to three kinds; return their names."""
    rng = random.Random(seed)
    chosen = kinds or tuple(rng.sample(KINDS, rng.choice((1, 1, 2, 3))))
    for each in chosen:
        each(model, rng)
    return tuple(each.__name__ for each in chosen)


def adversarial(architecture: str, seed: int, kinds: tuple[Change, ...] = ()) -> Drawn:
    """A tiny model with such weights, in float32 or with weights in bfloat16."""
    model = tiny_model(architecture, seed)
    names = change(model, seed, kinds)
    dtype = torch.bfloat16 if seed % 3 == 2 else torch.float32
    return Drawn(in_dtype(model, dtype), names, dtype)


@click.command()
@click.option("--count", default=1000, help="Models to load.")
@click.option("--first", default=0, help="The first seed.")
@click.option("--architectures", default=",".join(SERVED), help="Names, in turns.")
def main(count: int, first: int, architectures: str) -> None:
    """Load models with adversarial weights, and print those that are refused."""
    warnings.simplefilter("ignore")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    names = architectures.split(",")
    refused, shares = 0, []
    for seed in range(first, first + count):
        name = names[seed % len(names)]
        drawn = adversarial(name, seed)
        kinds = " ".join((str(drawn.dtype).removeprefix("torch."), *drawn.kinds))
        try:
            report = prepare_model(drawn.model, byte_tokenizer(), frozenset(), {}).report
        except ModelError as error:
            refused += 1
            click.echo(f"{seed} {name} {kinds}: {error}")
            continue
        shares.append(report.difference / max(report.threshold, 1e-30))
        if shares[-1] > _NEAR:
            click.echo(f"{seed} {name} {kinds}: {shares[-1]:.2g} of the allowance")
        if not report.bitwise:
            click.echo(f"{seed} {name} {kinds}: bits differ")
    shares.sort()
    click.echo(
        f"{refused} of {count} refused; difference over allowance: median "
        f"{shares[len(shares) // 2]:.2g}, largest {', '.join(f'{s:.2g}' for s in shares[-5:])}"
    )


if __name__ == "__main__":
    main()
