"""A model with random weights in formats of few bits, to measure steps with.

A step takes as long with random weights as with others. So every format can be measured over one
model, also those that no library here can write.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import Format
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels, PanelWriter, Parts
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, prepare_model
from ropewalk.model_runtime.loading.files.pretrained import load_tokenizer
from ropewalk.model_runtime.loading.low_bits.hold import hold, holders
from ropewalk.model_runtime.loading.low_bits.sizes import can_hold

_WIDTH = 0.02  # standard deviation of weights, about


def load_made(folder: Path, kind: Format) -> Checkpoint:
    """Load a folder's model with random weights of a format in the place of its own.

    Raises ModelError if the model cannot be served.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    fill_with(model, lambda _: kind)
    return prepare_model(model, load_tokenizer(folder), frozenset(), {})


def fill_with(model: Any, kind_of: Callable[[str], Format]) -> None:
    """Give a model's linears and embedding random weights, in place; `kind_of`: by name."""
    shapes = {name: tuple(each.weight.shape) for name, each in holders(model).items()}
    draw = np.random.default_rng(0)
    panels = {
        name: _panels(kind_of(name), shape, draw)
        for name, shape in shapes.items()
        if can_hold(name, shape, kind_of(name))
    }
    hold(model, panels)


def _panels(kind: Format, shape: tuple[int, ...], draw: np.random.Generator) -> LowBitPanels:
    num_outputs, num_inputs = shape
    q_NK = draw.integers(0, 1 << kind.bits, shape, dtype=np.uint8)
    by_block = num_outputs, num_inputs // kind.block
    by_group = num_outputs, num_inputs // kind.group
    size = _WIDTH / (max(kind.table) if kind.table else 2**kind.bits)
    factors = np.full(by_block, size, np.float16)
    if kind.has_powers:
        factors = np.full(by_block, 128 + round(np.log2(size)), np.uint8)
    minima = np.full(by_block, size * 2 ** (kind.bits - 1), np.float16)
    ones = np.ones(by_group, np.uint8)
    parts = Parts(
        kind,
        q_NK.view(np.int8) if kind.bits == 8 else q_NK,
        factors,
        minima if kind.has_minimum else None,
        ones if kind.scale_bits else None,
        ones if kind.scale_bits and kind.has_minimum else None,
    )
    writer = PanelWriter(kind, num_outputs, num_inputs)
    writer.write(0, parts)
    return writer.panels
