"""The model that the checks on a GPU share."""

import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def on_gpu(request: pytest.FixtureRequest) -> Checkpoint:
    """The embedded model, which passed its self-check on the GPU."""
    return load_checkpoint(EMBEDDED_MODEL, dtype=request.param, device="cuda")
