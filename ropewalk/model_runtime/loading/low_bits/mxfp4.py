"""The experts of gpt-oss in MXFP4: from safetensors into panels, one expert at a time.

Shapes: E = experts, O = outputs, G = groups of 32 inputs, B = 16 bytes of a group, K = inputs.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import MXFP4
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_blocks import MXFP4_ORDER
from ropewalk.model_runtime.formats.gguf.gguf_tensors import are_finite
from ropewalk.model_runtime.formats.quantised_inventory import Inventory, QuantisedWeight
from ropewalk.model_runtime.layers.experts.low_bit import ExpertMatrix
from ropewalk.model_runtime.loading.low_bits.hold import expert_holders, expert_matrices


def stored_experts(
    model: Any, inventory: Inventory, paths: Sequence[Path]
) -> dict[str, dict[str, ExpertMatrix]]:
    """Return the matrices of each layer's experts, by its name. Raises ModelError.

    `model` needs no weights.
    """
    stored = {each.name: each for each in inventory.quantised}
    found = {}
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, framework="np")) for path in paths}
        for name, module in expert_holders(model).items():
            names = expert_matrices(module)
            weights = {each: stored.get(f"{name}.{each}") for each in names}
            if all(weights.values()):
                found[name] = {key: _matrix(files, each) for key, each in weights.items() if each}
    return found


def _matrix(files: Mapping[Path, Any], weight: QuantisedWeight) -> ExpertMatrix:
    """Return a matrix with its outputs in the order of the file: gates and ups take turns."""
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        PanelWriter,
        Parts,
        panel_memory,
    )

    values, scale = (
        files[weight.parts[role].path].get_slice(weight.parts[role].name)
        for role in ("values", "scale")
    )
    num_experts, num_inputs, num_outputs = weight.shape
    size = MXFP4.num_bytes(num_outputs, num_inputs)
    memory = panel_memory(num_experts * size)
    parts_E = []
    for expert in range(num_experts):
        bytes_OGB, powers_OG = values[expert], scale[expert]
        if not are_finite(powers_OG):
            raise ModelError(f"{weight.parts['scale'].path}: {weight.name} has NaN or Inf")
        # The lower half of a byte is the first number.
        codes = np.stack([bytes_OGB & 15, bytes_OGB >> 4], axis=-1)
        q_OK = MXFP4_ORDER[codes].reshape(num_outputs, num_inputs)
        own = memory[expert * size : (expert + 1) * size]
        writer = PanelWriter(MXFP4, num_outputs, num_inputs, memory=own)
        writer.write(0, Parts(MXFP4, q_OK, np.ascontiguousarray(powers_OG)))
        parts_E.append((writer.panels,))
    return ExpertMatrix(parts_E)
