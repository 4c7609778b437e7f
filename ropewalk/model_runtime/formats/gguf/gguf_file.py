"""Read the header of a GGUF file: metadata, and where each tensor lies.

Source of the format: docs/gguf.md of the ggml project, versions 2 and 3, little-endian. The reader
of the package `gguf` takes 1.9 s for a vocabulary of 49,152 tokens, because it makes numpy views of
every string. This one takes 0.1 s, and its errors name the file and the place.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.ggml import READ_TYPES, block_of, type_name

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_MOST_STAMPED = 1000  # parts; a name may promise 99,999
_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_HEADER_BYTES = 24  # the magic, the version, and the counts of tensors and keys
# value type -> struct's letter
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"} | {
    12: "d"
}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file, with its dimensions in torch's order."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # ggml's name of the number type
    path: Path
    offset: int  # bytes from the beginning of the file
    row_bytes: int  # bytes of the last dimension

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a model's file, or of its first part, with the tensors of all parts."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    paths: tuple[Path, ...]  # of all parts

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    @property
    def architecture(self) -> str:
        """Return general.architecture. Raises ModelError."""
        return self.string("general.architecture")

    def string(self, key: str) -> str:
        """Return a string of the metadata. Raises ModelError."""
        value = self.metadata.get(key)
        if not isinstance(value, str) or not value:
            raise ModelError(f"{self.path}: {key} must be a text, {_found(value)}")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer >= `minimum`; a list of equal ones counts as one. Raises ModelError."""
        value = self.metadata.get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, list) and value:
            raise ModelError(f"{self.path}: {key} differs from layer to layer, which is not read")
        if type(value) is not int or value < minimum:
            raise ModelError(f"{self.path}: {key} must be an integer >= {minimum}, {_found(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number. Raises ModelError."""
        value = self.metadata.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(f"{self.path}: {key} must be a finite number, {_found(value)}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """Return true or false. Raises ModelError."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key} must be true or false, {_found(value)}")
        return value

    def listed(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """Return a list of `kind`; None if the file lacks it. Raises ModelError."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            raise ModelError(f"{self.path}: {key} must be a list, {_found(value)}")
        if length is not None and len(value) != length:
            raise ModelError(f"{self.path}: {key} has {len(value)} entries, {length} are needed")
        return value


def _found(value: Any) -> str:
    return "the file has none" if value is None else f"got {str(value)[:60]!r}"


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file and of its other parts. Raises ModelError with one sentence.

    A command reads a header several times, so the last one is kept while its files are the same.
    No caller changes the lists in it.
    """
    return _read_whole(path, tuple(map(_stamp, named_parts(path)[:_MOST_STAMPED])))


def named_parts(path: Path) -> list[Path]:
    """Return all parts of a file by its name, whether they are there or not."""
    match = _PART.fullmatch(path.name)
    return [path] if match is None else _named_parts(path, match, int(match[3]))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what differs if a file was written again; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@lru_cache(maxsize=1)
def _read_whole(path: Path, _stamps: tuple[tuple[int, int, int] | None, ...]) -> GgufFile:
    """Read all headers; the stamps are for the cache."""
    metadata, tensors = _read_part(path)
    others = _other_parts(path, metadata)
    for other in others:
        _, more = _read_part(other)
        doubled = sorted(set(more) & set(tensors))
        if doubled:
            raise ModelError(f"{other} repeats tensor {doubled[0]} of another part")
        tensors |= more
    total = metadata.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise ModelError(f"{path}: split.tensors.count is {total}, the parts have {len(tensors)}")
    return GgufFile(path, MappingProxyType(metadata), MappingProxyType(tensors), (path, *others))


def first_part(path: Path) -> Path:
    """Return the first part of a split file, or the file itself."""
    match = _PART.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")


def _named_parts(path: Path, match: re.Match[str], count: int) -> list[Path]:
    numbers = range(1, count + 1)
    return [path.with_name(f"{match[1]}-{at:05}-of-{match[3]}.gguf") for at in numbers]


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return []
    match = _PART.fullmatch(path.name)
    if match is None or type(count) is not int or int(match[3]) != count:
        raise ModelError(
            f"{path} is one of {count} parts (split.count), and its name does not end in "
            f"-00001-of-{count:05}.gguf, as the tool that split it names it"
        )
    paths = _named_parts(path, match, count)
    for each in paths:
        if not each.is_file():
            raise ModelError(f"{path} has {count} parts, and {each.name} is not beside it")
    if metadata.get("split.no", 0) != 0 or paths[0] != path:
        raise ModelError(f"{path} is not the first part: name {paths[0].name}")
    return paths[1:]


class _Header:
    """A cursor over the bytes of a header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def need(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise ModelError(
                f"{self.path} is truncated: its header needs {num_bytes} bytes at byte {self.at}, "
                f"the file has {len(self.data)}; {_AGAIN}"
            )

    def scalar(self, letter: str) -> Any:
        size = struct.calcsize(letter)
        self.need(size)
        (value,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self.need(length)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self.path}: the text at byte {self.at - length} is not UTF-8: {raw[:20]!r}"
            ) from error

    def value(self, key: str) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._decimal(self.scalar(self._letter(key, kind)), kind)

    def _letter(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: {key} has value type {kind}, which is not known")
        return _SCALARS[kind]

    def _array(self, key: str) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            self.need(8 * count)
            return [self.string() for _ in range(count)]
        letter = self._letter(key, kind)
        size = struct.calcsize(letter) * count
        self.need(size)
        raw = self.data[self.at : self.at + size]
        self.at += size
        found: list[Any] = np.frombuffer(raw, np.dtype(f"<{letter}")).tolist()
        return found

    @staticmethod
    def _decimal(value: Any, kind: int) -> Any:
        """Return a float32 as the shortest decimal number that means it.

        The converter was given 1e-05, not 9.999999747378752e-06.
        """
        if kind != _FLOAT32:
            return value
        return float(str(np.float32(value)))


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Read one file's metadata and tensors."""
    try:
        size = path.stat().st_size
        if size < _HEADER_BYTES:
            raise ModelError(
                f"{path} is truncated: it has {size} bytes, and GGUF's header has {_HEADER_BYTES}"
            )
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Header(path, data))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse(header: _Header) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    path = header.path
    magic = bytes(header.data[:4])
    if magic != MAGIC:
        raise ModelError(f"{path} is no GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
    header.at = 4
    version = header.scalar("I")
    if version not in _VERSIONS and version.to_bytes(4, "little")[::-1][0] in _VERSIONS:
        raise ModelError(
            f"{path} is big-endian, which is not read: convert it with gguf-convert-endian"
        )
    if version not in _VERSIONS:
        raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 are read")
    num_tensors, num_keys = header.scalar("Q"), header.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = header.string()
        if key in metadata:
            raise ModelError(f"{path} states {key} twice")
        metadata[key] = header.value(key)
    entries = [_entry(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise ModelError(f"{path}: general.alignment must be a multiple of 8, got {alignment!r}")
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ModelError(f"{path} has tensor {name} twice")
        tensors[name] = _tensor_info(header, name, shape, kind, start + offset)
    return metadata, tensors


def _entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dimensions = header.string(), header.scalar("I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise ModelError(
            f"{header.path}: tensor {name} has {num_dimensions} dimensions, 1 to 4 are read"
        )
    reversed_shape = [header.scalar("Q") for _ in range(num_dimensions)]
    return name, tuple(reversed(reversed_shape)), header.scalar("I"), header.scalar("Q")


def _tensor_info(
    header: _Header, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> TensorInfo:
    path, size = header.path, len(header.data)
    type_text = type_name(kind)
    if type_text not in READ_TYPES:
        raise ModelError(
            f"{path}: tensor {name} has number type {type_text or kind}, which is not read; "
            f"read are {', '.join(READ_TYPES)}"
        )
    num_values, num_bytes = block_of(type_text)
    if not all(shape) or shape[-1] % num_values:
        raise ModelError(
            f"{path}: tensor {name} has rows of {shape[-1]} values, {type_text} needs a multiple "
            f"of {num_values}"
        )
    row_bytes = shape[-1] // num_values * num_bytes
    end = offset + math.prod(shape[:-1]) * row_bytes
    if end > size:
        raise ModelError(
            f"{path} is truncated: tensor {name} ends at byte {end}, the file has {size}; {_AGAIN}"
        )
    return TensorInfo(name, shape, type_text, path, offset, row_bytes)
