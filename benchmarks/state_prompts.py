"""`python -m benchmarks.state_prompts`: what states cost in a prompt, beside transformers' forward.

The model has layers of Qwen 3.5 0.8B's shape with random weights in float32, three with a state and
one with attention in turns. Here a state advances token by token, and transformers computes chunks
of 64 tokens. Both forwards have the same weights and threads, and take turns.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.state_drafts import config_of, model_of
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.paged_attention import PagedStep, StateCall
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile

_PAGE = 64


class Row(NamedTuple):
    """The median seconds of a prompt."""

    num_threads: int
    own_s: float
    states_s: float  # of own_s: the advance of states, with convolutions, gates and norms
    transformers_s: float


class Watched:
    """Counts the seconds in which states are advanced."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.original: Callable[..., Any] = PagedStep.advance

    def __call__(self, step: PagedStep, layer_idx: int, call: StateCall) -> Any:
        began = time.perf_counter()
        result = self.original(step, layer_idx, call)
        self.seconds += time.perf_counter() - began
        return result

    def __get__(self, step: PagedStep, _: type) -> Callable[..., Any]:
        return lambda *arguments: self(step, *arguments)


class Prompts:
    """A served model and transformers' own, with one prompt."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        checkpoint = model_of(num_layers)
        self._ids = [7 + 5 * at % 2000 for at in range(num_tokens)]
        self._config: Qwen3_5TextConfig = config_of(num_layers)
        torch.manual_seed(1)
        self._plain: Any = AutoModelForCausalLM.from_config(self._config).eval()
        config = EngineConfig(
            kv_cache_tokens=2 * num_tokens, max_model_len=num_tokens, page_size=_PAGE
        )
        self._runner: ModelRunner = build_runner(checkpoint, config)
        table = checkpoint.native.tables[checkpoint.native.scaled_layer_type]
        self._table_id = self._runner.table_id(Profile(table.scaling))

    def served(self) -> float:
        """Return the seconds of the served forward."""
        num = len(self._ids)
        parts = (StatePart(num, None, 0),)
        pages = range(-(-num // _PAGE))
        span = Span(self._ids, 0, pages, self._table_id, range(num - 1, num), parts)
        began = time.perf_counter()
        self._runner.run([span])
        return time.perf_counter() - began

    @torch.inference_mode()
    def transformers(self) -> float:
        """Return the seconds of transformers' forward."""
        ids = torch.tensor([self._ids])
        began = time.perf_counter()
        self._plain(input_ids=ids, use_cache=False, logits_to_keep=1)
        return time.perf_counter() - began


def row_of(prompts: Prompts, num_threads: int, rounds: int) -> Row:
    """Measure both forwards in turns."""
    torch.set_num_threads(num_threads)
    watched = Watched()
    PagedStep.advance = watched  # type: ignore[method-assign, assignment]
    prompts.served()
    prompts.transformers()
    own, states, others = [], [], []
    for _ in range(rounds):
        watched.seconds = 0.0
        own.append(prompts.served())
        states.append(watched.seconds)
        others.append(prompts.transformers())
    PagedStep.advance = watched.original  # type: ignore[method-assign]
    return Row(num_threads, *(statistics.median(each) for each in (own, states, others)))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--layers", default=8, show_default=True, type=click.IntRange(4), help="Layers.")
@click.option("--tokens", default=2048, show_default=True, type=click.IntRange(_PAGE))
@click.option("--threads", default="1,2", show_default=True, help="Numbers of threads.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Prompts.")
def main(layers: int, tokens: int, threads: str, rounds: int) -> None:
    """Print the seconds of a prompt, and the share of states."""
    prompts = Prompts(layers, tokens)
    click.echo("| threads | prompt, s | of it states | transformers, s | times |")
    click.echo("|---:|---:|---:|---:|---:|")
    for count in map(int, threads.split(",")):
        row = row_of(prompts, count, rounds)
        click.echo(
            f"| {count} | {row.own_s:.2f} | {row.states_s / row.own_s:.0%} "
            f"| {row.transformers_s:.2f} | {row.transformers_s / row.own_s:.2f} |"
        )


if __name__ == "__main__":
    main()
