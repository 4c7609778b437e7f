"""The folder of a run, with the state from which training resumes after a stop.

Tensors are stored as safetensors, and the rest as JSON. Nothing is pickled.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from training.network import Network
from training.optimizer import Optimizer
from training.shape import Schedule, Shape

_TENSORS, _STATE = "state.safetensors", "state.json"
_WEIGHT, _OPTIMIZER = "weight.", "optimizer."


@dataclass(frozen=True, slots=True)
class Measured:
    """Losses in nats per token. Training losses are means since the last measurement."""

    step: int
    num_tokens: int
    seconds: float  # training time, over all parts of a run
    text: float
    answer: float
    repeat: float
    held_out: float
    held_out_answer: float


@dataclass
class Progress:
    """The state, beside the tensors, that the next step depends on."""

    step: int = 0
    seconds: float = 0.0
    formed_at: int | None = None  # the step after which retrieval counted as formed
    history: list[Measured] = field(default_factory=list)


class RunFolderError(Exception):
    """The folder holds a run with another shape or schedule."""


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path, shape: Shape, schedule: Schedule) -> None:
        self.path = path
        self._what = {"shape": asdict(shape), "schedule": asdict(schedule)}
        path.mkdir(parents=True, exist_ok=True)

    def save(self, network: Network, optimizer: Optimizer, progress: Progress) -> None:
        """Write the tensors, then the JSON file that names them.

        The JSON file is replaced in one operation, so it names only complete tensors. The tensors
        of earlier steps are deleted last.
        """
        tensors = {_WEIGHT + name: each for name, each in network.state_dict().items()}
        tensors |= {_OPTIMIZER + name: each for name, each in optimizer.state().items()}
        name = f"step{progress.step}.{_TENSORS}"
        save_file({key: each.contiguous() for key, each in tensors.items()}, self.path / name)
        state = {**self._what, "tensors": name, "progress": asdict(progress)}
        unfinished = self.path / f"{_STATE}.part"
        unfinished.write_text(json.dumps(state, indent=1))
        unfinished.replace(self.path / _STATE)
        for old in self.path.glob(f"step*.{_TENSORS}"):
            if old.name != name:
                old.unlink()

    def restore(self, network: Network, optimizer: Optimizer) -> Progress:
        """Load the stored state and return its progress, or a new one if nothing is stored.

        Raises RunFolderError if the stored shape or schedule differs.
        """
        if not (self.path / _STATE).is_file():
            return Progress()
        state = json.loads((self.path / _STATE).read_text())
        for name, mine in self._what.items():
            if state[name] != mine:
                raise RunFolderError(
                    f"{self.path} holds a run with another {name}: {state[name]}, not {mine}"
                )
        tensors = load_file(self.path / state["tensors"])
        network.load_state_dict(_part(tensors, _WEIGHT))
        optimizer.restore(_part(tensors, _OPTIMIZER))
        stored = state["progress"]
        history = [Measured(**each) for each in stored.pop("history")]
        return Progress(**stored, history=history)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }
