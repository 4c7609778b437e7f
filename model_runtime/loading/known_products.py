"""The products and the attention that a processor gets, remembered from an earlier trial.

Trials need torch and numba, which take seconds to import. Their result depends on the processor,
the libraries and our own sources only. It is kept beside numba's machine code.
"""

import hashlib
import json
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ropewalk.model_runtime.json_files import read_object
from ropewalk.model_runtime.loading.plain_config import PlainDevice, PlainNumberType

if TYPE_CHECKING:
    import torch

_ROOT = Path(__file__).parents[1]
_SOURCES = ("attention", "cpu_kernels", "layers")  # what decides, and what is tried
_VARIABLES = ("ATEN_", "DNNL_", "MKL_", "NUMBA_", "ONEDNN_")  # they may hide instructions
_LIBRARIES = ("llvmlite", "numba", "torch", "transformers")


class Words(NamedTuple):
    """The banner's words for what computes."""

    products: str
    attention: str
    low_bits: str  # the type of the numbers in which weights of few bits are multiplied


def expected_computing(
    device: "torch.device | PlainDevice", dtype: "torch.dtype | PlainNumberType"
) -> Words:
    """Return the banner's words before weights are loaded."""
    if not isinstance(device, PlainDevice):
        return _tried(device, str(dtype).removeprefix("torch."))
    name = str(dtype)
    key = f"{name} {fingerprint()}"
    file = _file(key)
    words = (read_object(file) or {}).get(key)
    if isinstance(words, list) and [type(each) for each in words] == [str] * len(Words._fields):
        return Words(*words)
    import torch  # noqa: PLC0415  # only for the first trial

    found = _tried(torch.device("cpu"), name)
    with suppress(OSError):  # a folder that cannot be written costs the next run its seconds
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps({key: found}))
        part.replace(file)
    return found


def _tried(device: "torch.device", name: str) -> Words:
    import torch  # noqa: PLC0415

    from ropewalk.model_runtime.loading.pack_model import expected_products  # noqa: PLC0415
    from ropewalk.model_runtime.runner.backends import described  # noqa: PLC0415

    dtype = getattr(torch, name)
    products, low_bits = expected_products(device, dtype)
    return Words(products, described(device), low_bits)


def _file(key: str) -> Path:
    """Return the file of one result; with one for all, processes at once would lose some."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or _ROOT / "cpu_kernels" / "__pycache__")
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return folder / f"ropewalk-products-{name}.json"


def fingerprint(*folders: Path) -> str:
    """Return a hash of what decides the arithmetic: processor, libraries, and our sources.

    `folders`: further folders of sources.
    """
    found = hashlib.sha256(f"{platform.machine()} {platform.python_version()}".encode())
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found.update(f"{name} {version(name)}\n".encode())
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            found.update(f"{name}={value}\n".encode())
    with suppress(OSError):
        # The first processor's lines, without its clock's current rate.
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        lines = [line for line in first.splitlines() if "MHz" not in line]
        found.update("\n".join(lines).encode())
    for folder in (*(_ROOT / each for each in _SOURCES), *folders):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
