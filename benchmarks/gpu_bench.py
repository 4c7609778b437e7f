"""The objects that the parts of the whole-model benchmark share.

A row becomes a line of JSON, and its `part` names the measurement. A row with `"part": "left_out"`
names a measurement that was left out, and the reason.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu_engine import Measured, measured
from benchmarks.gpu_model_inputs import (
    ModelSizes,
    Prompts,
    deployment_of,
    random_model,
    taken_over,
    twin,
)
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.loading.checkpoint import Checkpoint

Row = dict[str, Any]
OURS = "ropewalk"
WARM_UP_LEN = 4  # tokens of the answers that warm up


@dataclass(frozen=True)
class Bench:
    """The objects that the parts share: sizes, models, the machine's rates, and the deadline."""

    sizes: ModelSizes
    device: torch.device
    copy_bytes_s: float
    matrix_flop_s: float
    end: float  # deadline on the clock of time.monotonic()
    folder: Path  # where tables go that are no rows
    is_tiny: bool = False
    prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", Prompts(self.sizes.shape.vocab))

    @cached_property
    def theirs(self) -> LlamaForCausalLM:
        """Return the model that transformers runs."""
        sizes = self.sizes
        return random_model(sizes.shape, sizes.native_len, sizes.dtype, self.device)

    def twin(self) -> LlamaForCausalLM:
        return twin(self.theirs, self.sizes.shape, self.sizes.native_len)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Return a patched model over the same weights."""
        return taken_over(self.twin())

    @cached_property
    def deployment(self) -> Deployment:
        """Return the deployment, under which every request grows through the tiers."""
        return deployment_of(self.checkpoint, self.sizes)

    def has_time(self, seconds: float = 0.0) -> bool:
        return time.monotonic() + seconds < self.end

    def engine(
        self,
        stack: ExitStack,
        num_sequences: int,
        *,
        chunk_len: int | None = None,
        records: bool = True,
        max_draft_tokens: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> Measured:
        """Start an engine of ours, which stops when the stack ends."""
        chunk_len = chunk_len or self.sizes.chunk_len
        config = self.sizes.config(chunk_len, num_sequences, records=records)
        config = replace(config, max_draft_tokens=max_draft_tokens, kv_cache_dtype=kv_cache_dtype)
        return stack.enter_context(measured(self.checkpoint, self.deployment, config))


def left_out(what: str, why: str) -> Row:
    return {"part": "left_out", "what": what, "why": why}
