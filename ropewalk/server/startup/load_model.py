"""Find and load the model that the settings name; `serve`, `inspect` and `eval` share this."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ropewalk.model_runtime.formats.gguf.gguf_weights import find_gguf
from ropewalk.model_runtime.loading.hub.local_model import is_hub_id, local_model
from ropewalk.model_runtime.loading.hub.wanted import LocalModel, OnBytes, Wanted, no_bytes
from ropewalk.model_runtime.loading.low_bits.sizes import refuse_int8, refuse_rounding
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL, torch_device
from ropewalk.model_runtime.loading.phases import OnPhase, no_phases
from ropewalk.rope import NativeRope
from ropewalk.server.process.triton_needs import refuse_without_needs
from ropewalk.server.settings.load import ServeSettings

if TYPE_CHECKING:
    from ropewalk.model_runtime.loading.checkpoint import Checkpoint
    from ropewalk.model_runtime.parallel.ranks import Ranks


def find_model(
    settings: ServeSettings,
    *,
    weights: bool,
    on_phase: OnPhase = no_phases,
    on_bytes: OnBytes = no_bytes,
) -> LocalModel:
    """Return the settings' model, a folder or GGUF file; a hub id is downloaded. Raises ModelError.

    Without `weights` only the config and the tokenizer are downloaded.
    """
    if settings.model is None:
        return LocalModel(EMBEDDED_MODEL, has_weights=True)
    if settings.gguf_file is not None:
        path = find_gguf(settings.model, settings.gguf_file)
        if path is not None:
            return LocalModel(path, has_weights=True)
    if is_hub_id(settings.model):
        on_phase("downloading")
    wanted = Wanted(weights=weights, code=settings.trust_remote_code)
    return local_model(settings.model, wanted, settings.revision, on_bytes)


def load_model(
    settings: ServeSettings,
    on_phase: OnPhase = no_phases,
    on_bytes: OnBytes = no_bytes,
    on_native: Callable[[NativeRope], object] | None = None,
    ranks: "Ranks | None" = None,
    *,
    remembers: bool = False,
) -> "Checkpoint":
    """Download a hub id, set torch's threads, then load and check the model.

    `on_native` gets the config's rotary tables before any weight is read. `ranks`: the processes
    that hold the model together, if it is more than this one. `remembers`: as `load_checkpoint` has
    it. Raises ModelError, or SettingsError for what a GPU's kernels lack.
    """
    refuse_without_needs(torch_device(settings.device))
    if ranks is not None and settings.weights == "int8":
        refuse_int8("cpu", is_divided=True)
    if ranks is not None and settings.activations not in {"auto", "exact"}:
        refuse_rounding(torch_device(settings.device).type, settings.activations, is_divided=True)
    source = find_model(settings, weights=True, on_phase=on_phase, on_bytes=on_bytes).folder
    import torch  # noqa: PLC0415  # `inspect` loads no model without --heads

    from ropewalk.model_runtime.loading.checkpoint import load_checkpoint  # noqa: PLC0415

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif ranks is not None:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.size))
    dtype, device, trusts = settings.dtype, settings.device, settings.trust_remote_code
    load = partial(
        load_checkpoint,
        source,
        dtype=dtype,
        device=device,
        trust_remote_code=trusts,
        weights=settings.weights,
        activations=settings.activations,
        exact_batches=settings.exact_batches,
        on_phase=on_phase,
        on_native=on_native,
    )
    if ranks is None:
        return load(remembers=remembers)
    return ranks.load(load, source, dtype=dtype, device=device, trust_remote_code=trusts)
