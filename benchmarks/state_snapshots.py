"""Measure the prefix cache of a model with states: python -m benchmarks.state_snapshots.

The scheduler plans every step, and no model computes it. Tokens are random numbers. So the shares
of cached tokens and the slots are those of a server under the same requests, whatever its speed.
"""

import argparse
import random
from dataclasses import dataclass
from typing import Protocol

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.rope import native_rope

NATIVE_LEN, PAGE_SIZE, VOCAB_SIZE = 65_536, 64, 100_000
# Qwen 3.5 0.8B, by its config: 18 layers of 16 heads with 128 x 128 numbers.
SLOT_MIB = 18 * StateShape(3, 6144, 16, 128, 128).num_bytes / 2**20
_DEPLOYMENT = make_deployment(
    "m", native_rope({"max_position_embeddings": NATIVE_LEN, "head_dim": 8})
)
Tokens = tuple[int, ...]


class Answering(Protocol):
    """A server of prompts that come at once, or a simulation of one."""

    def answer(self, prompts: list[Tokens], num_tokens: int = 150) -> list[Tokens]:
        """Serve prompts; return each with its answer."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a load under one number of slots."""

    num_prompt_tokens: int
    num_cached: int
    most_slots: int

    @property
    def cached_share(self) -> float:
        return self.num_cached / self.num_prompt_tokens


def _tokens(rng: random.Random, least: int, most: int) -> Tokens:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(least, most)))


class Server:
    """A scheduler whose steps are computed at once."""

    def __init__(self, num_slots: int, num_running: int, seed: int) -> None:
        """Serve with that many slots; 0: a model without states, whose pages are shared alone."""
        self._rng = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self._scheduler = Scheduler(
            EngineConfig(
                kv_cache_tokens=4_000_000,
                max_model_len=NATIVE_LEN,
                page_size=PAGE_SIZE,
                max_num_seqs=num_running,
                max_num_batched_tokens=2048,
                num_state_slots=num_slots,
            )
        )
        self.num_prompt_tokens = self.num_cached = self.most_slots = 0

    def answer(self, prompts: list[Tokens], num_tokens: int = 150) -> list[Tokens]:
        """Serve prompts that come at once; return each with its answer."""
        sequences = []
        for prompt in prompts:
            placement = _DEPLOYMENT.place(RopeRequest(), len(prompt), num_tokens)
            sampling = SamplingParams(max_tokens=num_tokens)
            sequences.append(Sequence(Request("r", prompt, sampling, placement, "")))
            self._scheduler.add(sequences[-1])
        while self._scheduler.running or self._scheduler.waiting:
            self._step()
        self.num_prompt_tokens += sum(map(len, prompts))
        self.num_cached += sum(each.num_cached_tokens or 0 for each in sequences)
        return [tuple(each.token_ids) for each in sequences]

    def _step(self) -> None:
        states = self._scheduler.pages.states
        chunks = list(self._scheduler.schedule().chunks.values())
        if states is not None:
            for chunk in chunks:
                states.parts(chunk.sequence, chunk.num_tokens)
        for chunk in chunks:
            sequence, is_last = chunk.sequence, chunk.is_last
            self._scheduler.computed(chunk)
            if is_last:
                sequence.token_ids.append(self._rng.randrange(VOCAB_SIZE))
                if sequence.num_generated >= sequence.request.sampling.max_tokens:
                    self._scheduler.remove(sequence)
        if states is not None:
            held = states.pool.num_used + states.pool.num_cached
            self.most_slots = max(self.most_slots, held)


def conversations(server: Answering, rng: random.Random) -> None:
    """Send 24 conversations of ten turns under one system prompt, eight turns at a time."""
    system = _tokens(rng, 800, 800)
    texts = [system] * 24
    for _ in range(10):
        order = rng.sample(range(len(texts)), len(texts))
        for first in range(0, len(order), 8):
            chosen = order[first : first + 8]
            asked = [texts[each] + _tokens(rng, 30, 300) for each in chosen]
            for each, text in zip(chosen, server.answer(asked), strict=True):
                texts[each] = text


def shared_prefix(server: Answering, rng: random.Random) -> None:
    """Send ten bursts of 16 prompts at once; all of a burst share 3,000 tokens."""
    for _ in range(10):
        system = _tokens(rng, 3000, 3000)
        server.answer([system + _tokens(rng, 50, 500) for _ in range(16)], 50)


def branches(server: Answering, rng: random.Random) -> None:
    """Send 60 requests of an agent, each from any earlier end of a turn."""
    turns = [_tokens(rng, 2000, 2000)]
    for _ in range(60):
        (text,) = server.answer([rng.choice(turns) + _tokens(rng, 50, 400)])
        turns.append(text)


LOADS = {"ten turns": conversations, "shared prefix": shared_prefix, "branches": branches}


def measured(load: str, num_slots: int, num_running: int = 16, seed: int = 1) -> Result:
    """Send a load to a server with that many slots; 0: without states."""
    server = Server(num_slots, num_running, seed)
    LOADS[load](server, random.Random(seed))  # noqa: S311  # repeatable, not secret
    return Result(server.num_prompt_tokens, server.num_cached, server.most_slots)


def table(slots: list[int]) -> str:
    """Return a row for each load and number of slots, in Markdown."""
    lines = [
        "| load | slots | cached with states | cached without | slots used | MiB of 0.8B |",
        "|---|---|---|---|---|---|",
    ]
    for load in LOADS:
        plain = measured(load, 0)
        for num_slots in slots:
            found = measured(load, num_slots)
            cells = [load, str(num_slots), f"{found.cached_share:.1%}", f"{plain.cached_share:.1%}"]
            cells += [str(found.most_slots), f"{found.most_slots * SLOT_MIB:,.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", default="16,32,64,128", help="numbers of slots, with commas")
    options = parser.parse_args()
    print(table([int(each) for each in options.slots.split(",")]))  # noqa: T201


if __name__ == "__main__":
    main()
