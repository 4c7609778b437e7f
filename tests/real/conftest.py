"""Real checkpoints, what transformers makes of each, and a server of each.

A test chooses its checkpoint by an indirect parameter `checkpoint`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.real_model import RealModel, UnavailableError, real_gguf
from tests.checkpoints.real_reference import Reference
from tests.servers.processes import Server, running_server
from tests.servers.real_client import SHORT_LEN, YARN


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest) -> RealModel:
    """The checkpoint of a test."""
    found: RealModel = request.param
    return found


@pytest.fixture(scope="session")
def gguf_path(checkpoint: RealModel) -> Path:
    """The file. Without it, the tests are skipped, and fail in continuous integration."""
    try:
        return real_gguf(checkpoint)
    except UnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def reference(gguf_path: Path) -> Reference:
    """The model as transformers reads it from the file."""
    return Reference(gguf_path)


@pytest.fixture(scope="session")
def served(gguf_path: Path) -> Iterator[Server]:
    """`ropewalk serve` of the file with YaRN up to twice the trained length, under two names.

    `whole` has the length of the file, and `short` states one of 1,024 tokens. Activations are
    exact, as those of transformers.
    """
    short = {**YARN, "original_max_position_embeddings": SHORT_LEN}
    deployments = [
        {"name": "whole", "rope_scaling": YARN},
        {"name": "short", "rope_scaling": short},
    ]
    settings = ["--deployments", json.dumps(deployments), "--kv-cache-tokens", "12288"]
    settings += ["--activations", "exact"]
    with running_server(str(gguf_path), *settings) as server:
        yield server
