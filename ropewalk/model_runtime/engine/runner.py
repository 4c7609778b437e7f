"""The interface of the engine to what runs a step.

Shapes: R = rows of logits, V = vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.runner.sampler import SamplingRow
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile

# A shortage that another allocator than torch's own met.
_DEVICE_SHORTAGES = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; a CPU allocator raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "can't allocate memory" in text or text.startswith(_DEVICE_SHORTAGES)


class Launched(Protocol):
    """A step that the device may still be running."""

    def read(self) -> tuple[list[bool], list[int]]:
        """Wait for the step; return whether each row's logits are finite, and its token id."""


class Runner(Protocol):
    """The interface that runs a step: a ModelRunner, or a test's replacement."""

    def table_id(self, profile: Profile) -> int:
        """Return the id of a profile's rotation table."""

    def prepare(self, spans: Sequence[Span]) -> Callable[[], Tensor]:
        """Build the batch of a step and return its forward.

        The forward returns the logits [R, V] of the rows that the spans request.
        """

    def check_device(self) -> None:
        """Wait for the device. Raises if it no longer works."""

    @property
    def most_draft_rows(self) -> int:
        """Return the most rows of a decode step with drafts; 0: there is none."""

    def advance_states(self, parts: Iterable[tuple[int, Sequence[StatePart]]]) -> None:
        """Advance states by tokens of the last step's drafts; only of a model with states.

        `parts`: for each sequence, its first token in the flat row of the step, and the parts.
        """

    @property
    def is_asynchronous(self) -> bool:
        """Return whether `launch` returns before the device has run the step."""

    @property
    def is_captured(self) -> bool:
        """Return whether small steps are replayed, so no forward of the model waits for it."""

    def launch(
        self,
        spans: Sequence[Span],
        rows: Sequence[SamplingRow],
        before: tuple[Any, Sequence[int]] | None,
    ) -> Launched:
        """Start a step and its sampling from all rows; only of an asynchronous runner.

        `before`: the launched step whose tokens are the inputs of the first spans, which are
        decodes, and their rows in it; None: all tokens are in the spans.
        """


class StepMemoryError(Exception):
    """A step ran out of memory. States of layers may have changed, and nothing else has."""


@contextmanager
def memory_errors_told() -> Iterator[None]:
    """Raise StepMemoryError for such an error; after it, no state of a running sequence is used."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise StepMemoryError from error
