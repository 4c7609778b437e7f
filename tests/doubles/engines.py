"""Engines over tiny models, and the requests that tests send them."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, prepare_model
from ropewalk.model_runtime.page_groups import PageGroups, group_layers
from ropewalk.model_runtime.request import (
    FinishReason,
    Output,
    Request,
    SamplingParams,
    TokenLogprob,
)
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_model
from tests.doubles.tokens import byte_tokenizer

_ids = itertools.count()


def request(
    deployment: Deployment,
    prompt_ids: Sequence[int],
    rope: RopeRequest | None = None,
    cache_salt: str = "",
    **sampling: Any,
) -> Request:
    """A request placed like the server places it; greedy by default."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    tier_choice = deployment.choose(rope or RopeRequest(), len(prompt_ids), params.max_tokens)
    return Request(f"test-{next(_ids)}", tuple(prompt_ids), params, tier_choice, cache_salt)


@dataclass(frozen=True)
class Result:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    finish_reason: FinishReason | None
    num_rescales: int = 0

    @classmethod
    def of(cls, outputs: list[Output]) -> "Result":
        """The result of a request's joined outputs."""
        return cls(
            "".join(each.text for each in outputs),
            tuple(token for each in outputs for token in each.token_ids),
            tuple(entry for each in outputs for entry in each.logprobs),
            tuple(entry for each in outputs for entry in each.prompt_logprobs),
            outputs[-1].finish_reason,
            outputs[-1].num_rescales,
        )

    def prompt_logprob_values(self) -> list[float]:
        """One number per prompt token after the first."""
        return [entry.logprob for entry in self.prompt_logprobs if entry is not None]


class EngineFactory:
    """Makes engines and stops them."""

    def __init__(self) -> None:
        self._engines: list[Engine] = []

    def over(
        self,
        checkpoint: Checkpoint,
        *,
        runner: Any = None,
        observer: Observer | None = None,
        eos: frozenset[int] | None = None,
        **config: Any,
    ) -> Engine:
        """A started engine; `runner` replaces the model."""
        # Small pages, so that short prompts fill several.
        numbers = {"kv_cache_tokens": 4096, "max_model_len": 2048, "page_size": 16, **config}
        engine_config = EngineConfig(**numbers)
        if runner is None:
            engine = build_engine(checkpoint, engine_config, observer)
        else:
            engine = Engine(
                runner, checkpoint.tokenizer, engine_config, eos or frozenset(), observer
            )
        engine.start()
        self._engines.append(engine)
        return engine

    def alone(
        self, checkpoint: Checkpoint, requests: Sequence[Request], **config: Any
    ) -> list["Result"]:
        """The results of requests that are each served by an engine of its own."""
        return [answer(self.over(checkpoint, **config), each)[0] for each in requests]

    def stop_all(self) -> None:
        """End every engine; every page must be back by then."""
        for engine in self._engines:
            engine.stop()
            core = engine._core
            core.check_integrity()
            assert core.scheduler.pool.num_used == 0


class Preemptions(Observer):
    """An observer that counts preemptions."""

    def __init__(self) -> None:
        self.num = 0

    def preempted(self, request: Request) -> None:
        """Count one preemption."""
        self.num += 1


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Tokens of a prompt, which differ between seeds."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def tiny_checkpoint(
    architecture: str, seed: int = 0, *, exact_batches: bool = False, **overrides: Any
) -> Checkpoint:
    """A taken-over tiny model under a byte tokenizer, without end tokens."""
    model = tiny_model(architecture, seed, **overrides)
    return checkpoint_of(model, exact_batches=exact_batches)


def checkpoint_of(model: PreTrainedModel, *, exact_batches: bool = False) -> Checkpoint:
    """Take a model over; it cannot be used untouched afterwards."""
    return prepare_model(model, byte_tokenizer(), frozenset(), {}, exact_batches=exact_batches)


def deployment_of(checkpoint: Checkpoint, page_size: int = 1, **options: Any) -> Deployment:
    """A deployment of that checkpoint."""
    return make_deployment("tiny", checkpoint.native, DeploymentOptions(**options), page_size)


def groups_of(checkpoint: Checkpoint) -> PageGroups:
    """The groups of a model's layers, as a plan of 256 tokens has them."""
    groups, reason = group_layers(checkpoint.windows, checkpoint.plans, 256)
    assert reason is None
    assert groups.has_windows
    return groups


def answer(engine: Engine, *requests: Request) -> list[Result]:
    """Serve the requests together; returns their results."""
    return [Result.of(outputs) for outputs in engine.generate(requests)]


def num_same(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items, such as tokens, two sequences of one length begin with alike."""
    alike = [ours == theirs for ours, theirs in zip(one, other, strict=True)]
    return alike.index(False) if False in alike else len(alike)
