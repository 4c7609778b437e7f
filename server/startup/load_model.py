"""Load the model that the settings name; `serve`, `inspect` and `eval` share this."""

from typing import TYPE_CHECKING

from model_runtime.loading.model_config import EMBEDDED_MODEL
from model_runtime.loading.phases import OnPhase, no_phases
from server.settings.load import ServeSettings

if TYPE_CHECKING:
    from model_runtime.loading.checkpoint import Checkpoint


def load_model(settings: ServeSettings, on_phase: OnPhase = no_phases) -> "Checkpoint":
    """Set torch's threads, then load and check the model. Raises ModelError."""
    import torch  # noqa: PLC0415  # `inspect` loads no model without --heads

    from model_runtime.loading.checkpoint import load_checkpoint  # noqa: PLC0415

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return load_checkpoint(
        settings.model or EMBEDDED_MODEL,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        on_phase=on_phase,
    )
