"""Measure the prefix cache of a model with states: python -m benchmarks.state_snapshots.

The scheduler plans every step, and no model computes it. Tokens are random numbers. So the shares
of cached tokens and the slots are those of a server under the same requests, whatever its speed.
With `--engine`, an engine serves them with a small model of Qwen 3.5's class and random weights.
"""

import argparse
import itertools
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
_SMALL_VOCABULARY = 2048  # of the embedded model's tokenizer
_SMALL = {
    "model_type": "qwen3_5_text",
    "vocab_size": _SMALL_VOCABULARY,
    "max_position_embeddings": NATIVE_LEN,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


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


def _config(num_tokens: int, num_slots: int, num_running: int) -> EngineConfig:
    return EngineConfig(
        kv_cache_tokens=num_tokens,
        max_model_len=NATIVE_LEN,
        page_size=PAGE_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=2048,
        num_state_slots=num_slots,
    )


class Server:
    """A scheduler whose steps are computed at once."""

    def __init__(self, num_slots: int, num_running: int, seed: int) -> None:
        """Serve with that many slots; 0: a model without states, whose pages are shared alone."""
        self._rng = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self._scheduler = Scheduler(_config(4_000_000, num_slots, num_running))
        self.num_prompt_tokens = self.num_cached = self.most_slots = 0

    def answer(self, prompts: list[Tokens], num_tokens: int = 150) -> list[Tokens]:
        """Serve prompts that come at once; return each with its answer."""
        sequences = []
        for prompt in prompts:
            tier_choice = _DEPLOYMENT.choose(RopeRequest(), len(prompt), num_tokens)
            sampling = SamplingParams(max_tokens=num_tokens)
            sequences.append(Sequence(Request("r", prompt, sampling, tier_choice, "")))
            self._scheduler.add(sequences[-1])
        while self._scheduler.running or self._scheduler.waiting:
            self._step()
        self.num_prompt_tokens += sum(map(len, prompts))
        self.num_cached += sum(each.num_cached_tokens or 0 for each in sequences)
        return [tuple(each.token_ids) for each in sequences]

    def stop(self) -> None:
        """Do nothing; an engine has a thread to end."""

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


class EngineServer:
    """An engine over a small hybrid, whose answers are drawn."""

    def __init__(self, num_slots: int, num_running: int, seed: int) -> None:
        """Load the model, and start an engine with that many slots."""
        # Torch and transformers are slow to import, and the scheduler needs neither.
        import torch  # noqa: PLC0415
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

        from ropewalk.model_runtime.engine.build_engine import build_engine  # noqa: PLC0415
        from ropewalk.model_runtime.loading.checkpoint import prepare_model  # noqa: PLC0415
        from ropewalk.model_runtime.loading.files.pretrained import load_tokenizer  # noqa: PLC0415
        from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL  # noqa: PLC0415

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_SMALL)).eval()
        checkpoint = prepare_model(model, load_tokenizer(EMBEDDED_MODEL), frozenset(), {})
        self._deployment = make_deployment("m", checkpoint.native)
        self._engine = build_engine(checkpoint, _config(400_000, num_slots, num_running))
        self._engine.start()
        self._numbers = itertools.count()  # no two requests have one id
        self.num_prompt_tokens = self.num_cached = self.most_slots = 0

    def answer(self, prompts: list[Tokens], num_tokens: int = 150) -> list[Tokens]:
        """Serve prompts that come at once; return each with its answer."""
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1.0)
        asked = [tuple(each % _SMALL_VOCABULARY for each in prompt) for prompt in prompts]
        requests = []
        for ids in asked:
            tier_choice = self._deployment.choose(RopeRequest(), len(ids), num_tokens)
            requests.append(Request(f"{next(self._numbers)}", ids, sampling, tier_choice))
        served = self._engine.generate(requests)
        states = self._engine._core.scheduler.pages.states  # noqa: SLF001  # what it holds now
        assert states is not None
        self.most_slots = max(self.most_slots, states.pool.num_used + states.pool.num_cached)
        self.num_prompt_tokens += sum(map(len, prompts))
        self.num_cached += sum(outputs[-1].num_cached_tokens or 0 for outputs in served)
        return [
            (*ids, *(token for output in outputs for token in output.token_ids))
            for ids, outputs in zip(asked, served, strict=True)
        ]

    def stop(self) -> None:
        """End the engine's thread."""
        self._engine.stop()


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


def measured(
    load: str, num_slots: int, num_running: int = 16, seed: int = 1, *, is_engine: bool = False
) -> Result:
    """Send a load to a server with that many slots; 0: without states, and without an engine."""
    server = (EngineServer if is_engine else Server)(num_slots, num_running, seed)
    LOADS[load](server, random.Random(seed))  # noqa: S311  # repeatable, not secret
    server.stop()
    return Result(server.num_prompt_tokens, server.num_cached, server.most_slots)


def engine_table(slots: list[int]) -> str:
    """Return a row for each load and number of slots: an engine's share beside a scheduler's."""
    lines = ["| load | slots | cached by an engine | by the scheduler alone |", "|---|---|---|---|"]
    for load in LOADS:
        for num_slots in slots:
            served, planned = (
                measured(load, num_slots, is_engine=is_engine).cached_share
                for is_engine in (True, False)
            )
            lines.append(f"| {load} | {num_slots} | {served:.1%} | {planned:.1%} |")
    return "\n".join(lines)


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
    parser.add_argument("--engine", action="store_true", help="an engine beside the scheduler")
    options = parser.parse_args()
    made = engine_table if options.engine else table
    print(made([int(each) for each in options.slots.split(",")]))  # noqa: T201


if __name__ == "__main__":
    main()
