"""The metadata of one architecture, which notes what was read, so that nothing is lost silently."""

from typing import Any

from model_runtime.errors import ModelError
from model_runtime.gguf.file import GgufFile

# Keys that change no answer: notes of converters, and what other programs plan with.
_WITHOUT_EFFECT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})


class Fields:
    """The keys `{architecture}.*` of a file. Every method raises ModelError with one sentence."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._read = {self._prefix + key for key in _WITHOUT_EFFECT}

    def has(self, key: str) -> bool:
        return self._prefix + key in self.file.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def value(self, key: str) -> Any:
        """Return a value of any type; None if the file lacks it."""
        return self.file.metadata.get(self._noted(key))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        return self.file.integer(self._noted(key), default, minimum=minimum)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        return self.file.number(self._noted(key), default)

    def boolean(self, key: str, *, default: bool) -> bool:
        return self.file.boolean(self._noted(key), default=default)

    def refuse(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.file.path}: {self._prefix}{key} {problem}")

    def check_all_read(self) -> None:
        """Raise ModelError that names a key which nothing has read."""
        own = {key for key in self.file.metadata if key.startswith(self._prefix)}
        unread = sorted(own - self._read)
        if unread:
            value = str(self.file.metadata[unread[0]])[:60]
            raise ModelError(
                f"{self.file.path}: {unread[0]} is {value}, which is not read for architecture "
                f"{self.file.architecture}, so the answers would differ from the model's"
            )

    def _noted(self, key: str) -> str:
        self._read.add(self._prefix + key)
        return self._prefix + key
