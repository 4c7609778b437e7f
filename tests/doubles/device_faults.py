"""A GPU's fault ends the process that met it, so that the other cases still run.

After an illegal access every later call of CUDA fails in that process, and its message says nothing
about the case that it meets.
"""

import os

import pytest
import torch


def end_if_the_device_failed() -> None:
    """Wait for the GPU; after a fault, end an xdist worker, which is replaced, or else the run."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # xdist reports the case as the one that its worker crashed in
        fault = str(error).strip().partition("\n")[0]
        pytest.exit(f"the device failed, and no later case can run on it: {fault}", returncode=1)
