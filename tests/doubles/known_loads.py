"""Checks of tiny models that a process has made before: most tests need a model, not its check.

`KnownCheck` of the product compares bits of an earlier, full check and leaves the rest out, which
is a third of the work. Models are equal if class, config and the bits of their weights are.
"""

import hashlib
from typing import Any

import torch
from transformers import PreTrainedModel

from ropewalk.model_runtime.loading import checkpoint, self_check
from ropewalk.model_runtime.loading.full_check import FullCheck
from ropewalk.model_runtime.loading.known_check import CheckMemory, KnownCheck, remembered_check
from ropewalk.model_runtime.probing.untouched import PromptIds

_known: dict[str, KnownCheck] = {}


class ProcessMemory(CheckMemory):
    """The place of one model's check in this process; no file is read or written."""

    def conclude(
        self, check: FullCheck | KnownCheck, ids: PromptIds, digest: str, *, has_program: bool
    ) -> None:
        """Keep a full check, or compare the bits of a known one, as `CheckMemory` does."""
        if isinstance(check, KnownCheck):
            super().conclude(check, ids, digest, has_program=has_program)
        elif check.report.bitwise:
            _known[self.key] = remembered_check(check, ids, digest, has_program=has_program)


def memory_of(model: PreTrainedModel, **options: Any) -> ProcessMemory:
    """Return the place of a model that has not been patched yet; `options`: those of its load."""
    # Tests let a CPU stand for a GPU, and check fewer tokens.
    patched = checkpoint.has_cpu_kernels(torch.device("cpu")), self_check.DECODE_START
    facts = type(model).__name__, model.config.to_json_string(), options, patched
    found = hashlib.sha256(repr(facts).encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    key = found.hexdigest()
    return ProcessMemory(key, _known.get(key))
