"""A model that generates a given text, for tests of the code around a model."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.loading.checkpoint import Checkpoint


class Script:
    """Replaces the model runner: generates the tokens of a text, one a step."""

    def __init__(self, checkpoint: Checkpoint, text: str) -> None:
        self._ids = checkpoint.tokenizer.encode(text)
        self.fail_at: int | None = None
        self.delay_s = 0.0
        self.num_calls = 0
        self.before_run: Callable[[], None] = lambda: None

    is_asynchronous = False
    is_captured = False
    most_draft_rows = 0

    def table_id(self, profile: Any) -> int:
        """A table_id without a table."""
        return 0

    def prepare(self, spans: Sequence[Span]) -> Callable[[], Tensor]:
        """Return the forward of a step."""
        return partial(self.run, spans)

    def check_device(self) -> None:
        """A CPU never fails here; a test may replace this."""

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Return logits that have only one likely token; prompts here are one token long."""
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
