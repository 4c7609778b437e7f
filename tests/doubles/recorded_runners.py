"""Runners that replay recorded decode steps, and conversations that two runners serve alike.

Without a GPU a recording is the forward called again: it then reads the fixed places, and knows as
little of the step's numbers as a CUDA graph does.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits, Recorder
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile

CONFIG = EngineConfig(kv_cache_tokens=1024, max_model_len=256, page_size=16, max_num_seqs=6)
SPARE = CONFIG.num_pages


class Again:
    """A recorder that keeps the function and counts recordings and replays."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Record as in `Recorder`; the result is not there before the first replay."""
        self.num_recorded += 1
        # As a CUDA graph's warm-up: what is made at first use is made here.
        result = torch.empty(0, dtype=work().dtype)
        return result, partial(self._replay, work, result)

    def _replay(self, work: Callable[[], Tensor], result: Tensor) -> None:
        self.num_replayed += 1
        result.set_(work())


def runner_of(
    checkpoint: Checkpoint,
    record: Again | None,
    profiles: Sequence[Profile],
    num_rope_tables: int = 1,
    max_prompt_rows: int = 0,
) -> ModelRunner:
    """A runner with a page that no sequence holds."""
    larger = EngineConfig(
        kv_cache_tokens=CONFIG.kv_cache_tokens + CONFIG.page_size,
        max_model_len=CONFIG.max_model_len,
        page_size=CONFIG.page_size,
        num_rope_tables=num_rope_tables,
    )
    runner = build_runner(checkpoint, larger, profiles)
    if record is not None:
        capture(runner, record, max_prompt_rows=max_prompt_rows)
    return runner


def capture(
    runner: ModelRunner,
    record: Recorder,
    *,
    max_rows: int = CONFIG.max_num_seqs,
    max_prompt_rows: int = 0,
    max_prompt_tokens: int = 0,
) -> None:
    """Capture a runner's steps over contexts of the common length."""
    rows = max_rows, SPARE, max_prompt_rows, max_prompt_tokens
    runner.capture_graphs(CaptureLimits(CONFIG.max_model_len, *rows), record)


class Conversations:
    """Sequences that two runners serve in the same steps."""

    def __init__(self, runners: Sequence[ModelRunner], profiles: Sequence[Profile]) -> None:
        self.runners = runners
        self.profiles = list(profiles)
        self.tokens = [torch.randint(199, (250,)).tolist() for _ in profiles]
        self.lens = [0] * len(profiles)
        self.pages = [list(range(16 * index, 16 * index + 16)) for index in range(len(profiles))]

    def step(
        self, num_tokens: dict[int, int], num_logits: dict[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both runners' logits of the last tokens of each sequence; of one token by default."""
        answers = []
        for runner in self.runners:
            spans = []
            for index, count in num_tokens.items():
                first = self.lens[index]
                tokens = self.tokens[index][first : first + count]
                table_id = runner.table_id(self.profiles[index])
                rows = range(count - (num_logits or {}).get(index, 1), count)
                states = (StatePart(count, index if first else None, index),)
                if runner._states is None:
                    states = ()
                spans.append(Span(tokens, first, self.pages[index], table_id, rows, states))
            answers.append(runner.run(spans).clone())
        for index, count in num_tokens.items():
            self.lens[index] += count
        return answers[0], answers[1]
