"""The real checkpoint, what transformers makes of it, and a server of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Server, running_server
from tests.real_model import Reference, UnavailableError, read_by_transformers, real_gguf


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    """The file. Without it, the tests are skipped, and fail in continuous integration."""
    try:
        return real_gguf()
    except UnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> Reference:
    """Read the file by transformers."""
    return read_by_transformers(gguf_path)


@pytest.fixture(scope="module")
def served(gguf_path: Path) -> Iterator[Server]:
    """`ropewalk serve` of the file, with YaRN up to twice the trained length."""
    settings = ["--rope-scaling", '{"rope_type": "yarn", "factor": 2.0}']
    settings += ["--kv-cache-tokens", "24576", "--served-model-name", "smollm2"]
    with running_server(str(gguf_path), *settings) as server:
        yield server
