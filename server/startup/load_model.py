"""Load the model that the settings name; `serve`, `inspect` and `eval` share this."""

import torch

from model_runtime.loading.checkpoint import (
    EMBEDDED_MODEL,
    Checkpoint,
    OnPhase,
    load_checkpoint,
    no_phases,
)
from server.settings.load import ServeSettings


def load_model(settings: ServeSettings, on_phase: OnPhase = no_phases) -> Checkpoint:
    """Set torch's threads, then load and check the model. Raises ModelError."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return load_checkpoint(
        settings.model or EMBEDDED_MODEL,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        on_phase=on_phase,
    )
