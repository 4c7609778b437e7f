"""Load the model that the settings name; `serve`, `inspect` and `eval` share this."""

from pathlib import Path
from typing import TYPE_CHECKING

from model_runtime.gguf.locate import find_gguf
from model_runtime.loading.model_config import EMBEDDED_MODEL
from model_runtime.loading.phases import OnPhase, no_phases
from server.settings.load import ServeSettings

if TYPE_CHECKING:
    from model_runtime.loading.checkpoint import Checkpoint


def model_source(settings: ServeSettings) -> str | Path:
    """Return the model's folder, GGUF file or hub id. Raises ModelError for a bad `gguf_file`."""
    source = settings.model or EMBEDDED_MODEL
    if settings.gguf_file is None:
        return source
    return find_gguf(source, settings.gguf_file) or source


def load_model(settings: ServeSettings, on_phase: OnPhase = no_phases) -> "Checkpoint":
    """Set torch's threads, then load and check the model. Raises ModelError."""
    import torch  # noqa: PLC0415  # `inspect` loads no model without --heads

    from model_runtime.loading.checkpoint import load_checkpoint  # noqa: PLC0415

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return load_checkpoint(
        model_source(settings),
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        on_phase=on_phase,
    )
