"""`python -m benchmarks.cpu.state_drafts`: what drafts gain for a model whose layers keep states.

The model has layers of Qwen 3.5 0.8B's shape, random weights, and the 0.8B's share of vocabulary
for each layer. One sequence decodes at a time, without and with drafts in turns, and all answers
must be equal. Tokens are drawn at random. In `predicted`, the client predicts them, with one wrong
token in eight. In `random` it does not, so no draft is right but by chance. In `repeated` the
likeliest tokens are chosen. A model with random weights and a tied head then repeats itself, and
drafts come from the text so far. `--file` measures a GGUF, such as one of `models/gguf_hybrid.py`.
"""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

from ropewalk.model_runtime.config import DEFAULT_DRAFT_TOKENS, EngineConfig
from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import (
    Checkpoint,
    load_checkpoint,
    prepare_model,
)
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.text.tokenizer import Tokenizer

_VOCAB_PER_LAYER = 248_320 // 24
_PROMPT, _ANSWER = 48, 96  # tokens
_WRONG = 8  # of so many predicted tokens, one is
SCENARIOS = ("predicted", "random", "repeated")


class Counted(Observer):
    """Counts the tokens of drafts."""

    def __init__(self) -> None:
        self.num_drafted = self.num_accepted = 0

    def speculated(self, num_drafted: int, num_accepted: int) -> None:
        """Count a draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


def config_of(num_layers: int, **sizes: int) -> Qwen3_5TextConfig:
    """Return the model's config. `sizes`: other numbers of it."""
    numbers = {
        "max_position_embeddings": 4096,
        "vocab_size": num_layers * _VOCAB_PER_LAYER,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        **sizes,
    }
    return Qwen3_5TextConfig(
        num_hidden_layers=num_layers,
        tie_word_embeddings=True,
        eos_token_id=None,
        **numbers,
    )


def model_of(num_layers: int, **sizes: int) -> Checkpoint:
    """Build and check the model in float32. `sizes`: other numbers of its config."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(num_layers, **sizes)).eval()
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(EMBEDDED_MODEL))
    return prepare_model(model, tokenizer, frozenset(), {})


def asked(deployment: Deployment, scenario: str, number: int) -> Request:
    """Return a request, before it has a prediction."""
    rng = random.Random(number)  # noqa: S311  # repeatable, not secret
    prompt = tuple(rng.randrange(200) for _ in range(_PROMPT))
    temperature = 0.0 if scenario == "repeated" else 1.0
    sampling = SamplingParams(
        max_tokens=_ANSWER, temperature=temperature, seed=number, ignore_eos=True
    )
    tier_choice = deployment.choose(RopeRequest(), _PROMPT, _ANSWER)
    return Request(f"{scenario}-{number}", prompt, sampling, tier_choice, "")


def answered(engine: Engine, request: Request) -> tuple[tuple[int, ...], float]:
    """Return the tokens of an answer, and the seconds from the request to the last one."""
    began = time.perf_counter()
    (outputs,) = engine.generate([request])
    seconds = time.perf_counter() - began
    return tuple(token for each in outputs for token in each.token_ids), seconds


def pairs(
    engines: tuple[Engine, Engine], deployment: Deployment, scenario: str, rounds: int
) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each answer without and with drafts."""
    off, on = engines
    for number in range(rounds):
        request = asked(deployment, scenario, number)
        tokens, before = answered(off, request)
        if scenario == "predicted":
            wrong = [0 if at % _WRONG == 0 else each for at, each in enumerate(tokens, 1)]
            request = replace(request, prediction_ids=tuple(wrong))
        drafted, after = answered(on, request)
        if drafted != tokens:
            raise click.ClickException(f"{scenario}: a draft changed answer {number}")
        yield before, after


@click.command()
@click.option("--file", type=click.Path(exists=True, path_type=Path), help="A model's file.")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(4), help="Layers.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Answers.")
def main(file: Path | None, layers: int, threads: int, rounds: int) -> None:
    """Print the tokens a second without and with drafts, and the share of right tokens."""
    torch.set_num_threads(threads)
    checkpoint = model_of(layers) if file is None else load_checkpoint(file)
    click.echo(table(checkpoint, rounds))


def table(checkpoint: Checkpoint, rounds: int) -> str:
    """Return a row for each scenario, in Markdown."""
    deployment = make_deployment("model", checkpoint.native, DeploymentOptions())
    config = EngineConfig(kv_cache_tokens=8192, max_model_len=1024, max_num_seqs=4)
    lines = [
        "| scenario | tokens/s without | with drafts | ratio | right tokens of drafts |",
        "|---|---|---|---|---|",
    ]
    for scenario in SCENARIOS:
        counted = Counted()
        off = build_engine(checkpoint, config)
        on = build_engine(
            checkpoint, replace(config, max_draft_tokens=DEFAULT_DRAFT_TOKENS), counted
        )
        for engine in (off, on):
            engine.start()
            answered(engine, asked(deployment, "random", -1))
        counted.num_drafted = counted.num_accepted = 0
        seconds = list(pairs((off, on), deployment, scenario, rounds))
        for engine in (off, on):
            engine.stop()
        before, after = (statistics.median(each) for each in zip(*seconds, strict=True))
        ratio = statistics.median(one / other for one, other in seconds)
        lines.append(
            f"| {scenario} | {_ANSWER / before:.1f} | {_ANSWER / after:.1f} | {ratio:.2f} "
            f"| {counted.num_accepted} of {counted.num_drafted} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
