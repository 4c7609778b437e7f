"""`python -m benchmarks.state_engine`: the loads of `state_snapshots.py` through the whole engine.

The model is computed, with states of the size of Qwen 3.5 0.8B in three layers of four and random
weights. Its other sizes are small, so that a load takes minutes. Prompts, answers and the times at
which requests come are those of the simulation. So both should find the same tokens in the cache.
"""

import random
from pathlib import Path

import click
import torch

from benchmarks.state_drafts import model_of
from benchmarks.state_snapshots import LOADS, PAGE_SIZE, Result, Tokens, measured
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.state_shape import bytes_per_state

_VOCABULARY, _LONGEST, _RUNNING = 2048, 16_384, 16
_SMALL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": _LONGEST,
}
_MIB = 2**20


def small_model(num_layers: int, **sizes: int) -> Checkpoint:
    """Return the model. `sizes`: other numbers of its config."""
    return model_of(num_layers, **{**_SMALL, **sizes})


class Held(Observer):
    """Notes the most slots that sequences held."""

    def __init__(self) -> None:
        self.most_used = 0

    def states_held(self, num_used_slots: int) -> None:
        """Note the slots of a step."""
        self.most_used = max(self.most_used, num_used_slots)


class EngineServer:
    """An engine whose answers have the lengths of the simulation."""

    def __init__(self, checkpoint: Checkpoint, num_slots: int, num_tokens: int) -> None:
        """Start an engine with that many slots and a cache of `num_tokens` tokens."""
        config = EngineConfig(
            kv_cache_tokens=num_tokens,
            max_model_len=_LONGEST,
            page_size=PAGE_SIZE,
            max_num_seqs=_RUNNING,
            max_num_batched_tokens=2048,
            num_state_slots=num_slots,
        )
        self._deployment = make_deployment("m", checkpoint.native, DeploymentOptions())
        self.held = Held()
        self.engine = build_engine(checkpoint, config, self.held)
        self.num_prompt_tokens = self.num_cached = self._num_sent = 0

    def answer(self, prompts: list[Tokens], num_tokens: int = 150) -> list[Tokens]:
        """Serve prompts that come at once; return each with its answer."""
        requests = [self._request(each, num_tokens) for each in prompts]
        texts = []
        for request, outputs in zip(requests, self.engine.generate(requests), strict=True):
            self.num_prompt_tokens += len(request.prompt_ids)
            self.num_cached += max(each.num_cached_tokens for each in outputs)
            answer = (token for each in outputs for token in each.token_ids)
            texts.append((*request.prompt_ids, *answer))
        return texts

    def _request(self, prompt: Tokens, num_tokens: int) -> Request:
        self._num_sent += 1
        ids = tuple(token % _VOCABULARY for token in prompt)
        sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=self._num_sent)
        placement = self._deployment.place(RopeRequest(), len(ids), num_tokens)
        return Request(f"r{self._num_sent}", ids, sampling, placement, "")


def run_load(checkpoint: Checkpoint, load: str, num_slots: int, seed: int = 1) -> Result:
    """Send a load to a new engine."""
    server = EngineServer(checkpoint, num_slots, num_tokens=400_000)
    server.engine.start()
    try:
        LOADS[load](server, random.Random(seed))  # noqa: S311  # repeatable, not secret
    finally:
        server.engine.stop()
    return Result(server.num_prompt_tokens, server.num_cached, server.held.most_used)


def _resident_mib() -> float:
    """Return the memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / _MIB


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--slots", default="32,128", show_default=True, help="Numbers of slots.")
@click.option("--load", "loads", multiple=True, type=click.Choice(list(LOADS)), help="Only these.")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(4))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
def main(slots: str, loads: tuple[str, ...], layers: int, threads: int) -> None:
    """Print the share of cached tokens by the engine and by the simulation."""
    torch.set_num_threads(threads)
    checkpoint = small_model(layers)
    slot_mib = bytes_per_state(checkpoint.states) / _MIB
    click.echo(
        "| load | slots | cached, engine | cached, simulated | MiB of slots | resident MiB |"
    )
    click.echo("|---|---:|---:|---:|---:|---:|")
    for load in loads or LOADS:
        for num_slots in map(int, slots.split(",")):
            before = _resident_mib()
            found, simulated = run_load(checkpoint, load, num_slots), measured(load, num_slots)
            click.echo(
                f"| {load} | {num_slots} | {found.cached_share:.1%} "
                f"| {simulated.cached_share:.1%} | {num_slots * slot_mib:.0f} "
                f"| {_resident_mib() - before:.0f} |"
            )


if __name__ == "__main__":
    main()
