"""A model that generates a given text, for tests of the code around a model."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from model_runtime.batch import Span
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.runner.step_timer import StepTimer


class Script:
    """Replaces the model runner: generates the tokens of a text, one a step."""

    def __init__(self, checkpoint: Checkpoint, text: str) -> None:
        self._ids = checkpoint.tokenizer.encode(text)
        self.fail_at: int | None = None
        self.delay_s = 0.0
        self.num_calls = 0
        self.before_run: Callable[[], None] = lambda: None

    def table_slot(self, profile: Any) -> int:
        """A slot without a table."""
        return 0

    def run(self, spans: Sequence[Span], clock: StepTimer) -> Tensor:
        """Logits that have only one likely token; prompts here are one token long."""
        clock.switch("forward")
        self.num_calls += 1
        self.before_run()
        time.sleep(self.delay_s)
        if self.num_calls == self.fail_at:
            raise RuntimeError("out of chalk")
        rows = []
        for span in spans:
            for row in span.logit_rows:
                logits = torch.full((256,), -30.0)
                logits[self._ids[(span.first_position + row) % len(self._ids)]] = 0.0
                rows.append(logits)
        return torch.stack(rows) if rows else torch.empty(0, 256)
