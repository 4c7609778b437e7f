"""Remember the outcome of a self-check, so that later starts of the same model are shorter.

A start with the files, settings, software and processor of an earlier one runs the two prompts as
they will be served. If the bits of their logits are those of the checked model, then so is its
distance from the untouched one. Anything else means a full check.

Only models whose bits do not depend on the batch are remembered: others may differ by chance.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError
from torch import nn

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.kept_facts import read_kept, write_kept
from ropewalk.model_runtime.known_trials import arithmetic_hash, kept_folder
from ropewalk.model_runtime.loading.full_check import FullCheck
from ropewalk.model_runtime.loading.install_forward import AnyForward, install_known
from ropewalk.model_runtime.loading.low_bits.quantise import Distance
from ropewalk.model_runtime.loading.low_bits.rounding import round_rows
from ropewalk.model_runtime.loading.low_bits.sizes import Activations
from ropewalk.model_runtime.loading.self_check import SelfCheckReport
from ropewalk.model_runtime.probing.untouched import PromptIds

_log = structlog.get_logger(__name__)

_ROOT = Path(__file__).parents[2]
_SOURCES = (_ROOT / "rope", _ROOT / "model_runtime")
_FILE = "ropewalk-self-checks.json"


@dataclass(frozen=True, slots=True)
class KnownCheck:
    """The outcome of a self-check. Its methods replace those of `FullCheck`."""

    prompts: str  # a hash of their tokens, which follow from the tokenizer
    report: SelfCheckReport
    rounding: Distance | None  # of rounded activations from exact ones
    has_program: bool  # the model's own forward is replaced
    digest: str  # of the logits as they are served

    def compare_structure(self, *_: object) -> None:
        """Do nothing: the structure is that of the checked model if key and digest are."""

    def compare_products(self, *_: object) -> None:
        """Do nothing, as for the structure."""

    def round_rows(self, model: nn.Module, activations: Activations) -> None:
        """Let a packed model round its activations, in place. Raises ModelError."""
        round_rows(model, activations)

    def install(self, model: nn.Module, forward: AnyForward) -> bool:
        """Install the model's program if it was installed before; return whether it is."""
        if self.has_program:
            install_known(model, forward)
        return self.has_program


_CHECKS = TypeAdapter(KnownCheck)


class OtherBitsError(ModelError):
    """A model has other bits than those that its files had when they were checked."""


@dataclass(frozen=True, slots=True)
class CheckMemory:
    """The place of one model's check."""

    key: str
    known: KnownCheck | None

    def of(self, ids: PromptIds) -> KnownCheck | None:
        """Return the check of these prompts; None if there is none."""
        is_known = self.known is not None and self.known.prompts == _hash_of(ids)
        return self.known if is_known else None

    def conclude(
        self, check: FullCheck | KnownCheck, ids: PromptIds, digest: str, *, has_program: bool
    ) -> None:
        """Keep a full check for later starts, if the bits do not depend on the batch.

        Raises OtherBitsError for a known one with another digest.
        """
        if isinstance(check, KnownCheck):
            if digest != check.digest:
                raise OtherBitsError("the model has other bits than when it was checked")
            return
        path = kept_folder() / _FILE
        kept = read_kept(path)
        kept.pop(self.key, None)  # the newest is the last, and other bits are no check of these
        if check.report.bitwise:
            parts = check.report, check.rounding, has_program, digest
            kept[self.key] = asdict(KnownCheck(_hash_of(ids), *parts))
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_kept(path, kept)

    def forgotten(self, error: ModelError) -> "CheckMemory":
        """Return the place with a full check ahead, after a known one has failed."""
        _log.warning("self_check_repeated", reason=str(error))
        return CheckMemory(self.key, None)


def _hash_of(ids: PromptIds) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def check_memory(
    versions: Mapping[Path, str | None], facts: Mapping[str, str]
) -> CheckMemory | None:
    """Return the place of a model's check; None if a file's version is unknown.

    `versions`: of the files that decide its numbers. `facts`: the settings that do.
    """
    if not versions or None in versions.values():
        return None
    parts = [*versions.values()], dict(facts), arithmetic_hash(*_SOURCES)
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    kept = read_kept(kept_folder() / _FILE).get(key)
    try:
        return CheckMemory(key, None if kept is None else _CHECKS.validate_python(kept))
    except ValidationError:  # it was damaged
        return CheckMemory(key, None)
