"""Facts for the plans of models that are not there."""

from collections.abc import Mapping
from typing import Any

import torch

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory
from ropewalk.model_runtime.loading.model_config import KVShape
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.rope import NativeRope
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.planning.serving_plan import ModelFacts

_HOST = MachineMemory(2**42, 2**42)


def model_facts(
    settings: ServeSettings,
    native: NativeRope,
    token_bytes: int = 1024,
    affordable_bytes: int = 0,
    *,
    slot_bytes: int = 0,
    windows: Mapping[int, int | None] | None = None,
    **more: Any,
) -> ModelFacts:
    """Facts of a model in float32 whose tokens, in layers alike, take so many bytes."""
    windows = windows or {0: None}
    dim = token_bytes // len(windows) // 8
    states = {len(windows): StateShape(slot_bytes // 4, 1)} if slot_bytes else {}
    layout = CacheLayout(
        dict.fromkeys(windows, KVShape(1, dim, dim)),
        torch.float32,
        settings.page_size,
        settings.kv_cache_dtype,
        states=states,
    )
    return ModelFacts(native, layout, windows, affordable_bytes, **{"host": _HOST, **more})
