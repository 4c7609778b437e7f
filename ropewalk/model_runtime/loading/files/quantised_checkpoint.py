"""Load a quantised safetensors checkpoint with its weights in the served number type.

transformers' own loaders are not used. They need accelerate or a package for each format, and some
keep other precision than the served number type.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.dequantise import open_weights
from ropewalk.model_runtime.formats.quantised_inventory import read_inventory
from ropewalk.model_runtime.formats.quantised_scheme import Scheme
from ropewalk.model_runtime.loading.files.folder_files import weight_files
from ropewalk.model_runtime.loading.files.pretrained import from_pretrained
from ropewalk.model_runtime.loading.low_bits.codes import StoredWeights
from ropewalk.model_runtime.loading.low_bits.hold import IN_CODES, hold, hold_experts
from ropewalk.model_runtime.loading.low_bits.mxfp4 import stored_experts
from ropewalk.model_runtime.loading.low_bits.sizes import is_kept
from ropewalk.model_runtime.loading.text_part import config_of_model, factory_of

_log = structlog.get_logger(__name__)


def load_quantised(
    source: str | Path,
    config: Any,
    scheme: Scheme,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool,
    keeps_bits: bool = False,
    device: torch.device | None = None,
) -> tuple[Any, Mapping[str, Any]]:
    """Return the model and the loading info of transformers. Raises ModelError.

    `config` has no `quantization_config`. Beside the loaded weights, each of transformers' threads
    holds one stored weight, and a few MiB of it in float32. With `keeps_bits`, experts in MXFP4
    stay so; with a device, all weights that modules can hold as codes stay so, on the device.
    """
    paths = weight_files(Path(source))
    inventory = read_inventory(paths, scheme)
    stored_bytes = sum(path.stat().st_size for path in paths)
    if keeps_bits and device is not None:
        _log.info("reading_quantised", stored_in=str(scheme), stored_bytes=stored_bytes)
    else:
        _log.info(
            "dequantising",
            stored_in=str(scheme),
            served_in=str(dtype).removeprefix("torch."),
            stored_bytes=stored_bytes,
            loaded_bytes=inventory.num_parameters * dtype.itemsize,
        )
    with torch.device("meta"):
        empty = factory_of(config).from_config(config, trust_remote_code=trust_remote_code)
    linears: Mapping[str, Any] = {}
    experts: Mapping[str, Mapping[str, Any]] = {}
    inside: set[str] = set()  # what files name otherwise
    if keeps_bits and device is not None:
        stored = StoredWeights(empty, inventory)
        (linears, experts), inside = stored.read(paths, device), stored.names()
    elif keeps_bits and is_kept(scheme):
        experts = stored_experts(empty, inventory, paths)
    held = [*linears, *(f"{name}.{each}" for name, found in experts.items() for each in found)]
    shapes = {name: tuple(empty.get_parameter(name).shape) for name in held}
    with open_weights(paths, inventory, dtype) as files:
        weights = {name: each for name, each in files.items() if name not in inside}
        # A view of one number stands for a weight in few bits, and takes no memory.
        views = {name: torch.zeros(1, dtype=dtype).expand(shapes[name]) for name in held}
        model, info = from_pretrained(
            type(empty),
            None,
            config=config_of_model(config),
            state_dict={**weights, **views},
            dtype=dtype,
            output_loading_info=True,
            described=source,
        )
    if device is not None:
        hold(model, linears, IN_CODES)
        for name, matrices in experts.items():
            hold_experts(model, name, matrices, IN_CODES)
        return model, info
    for name, matrices in experts.items():
        # Afterwards the parameters of the experts are no longer those of the model.
        for own, each in model.get_submodule(name).named_parameters():
            if own not in matrices and not bool(each.isfinite().all()):
                raise ModelError(f"{source}: weight {name}.{own} has NaN or Inf")
        hold_experts(model, name, matrices)
    return model, info
