"""The choice of the attention backend for a device, and a cache in that backend's layout.

Each backend is imported only for its device. A machine with a GPU needs no working numba.
"""

from collections.abc import Mapping

import torch

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.paged_attention import Backend, LayerPlan, SlotStore
from ropewalk.model_runtime.attention.quantised.cache import QuantisedCache
from ropewalk.model_runtime.attention.quantised.page_format import (
    FIXED8,
    refuse_format_on,
)
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.config import PAGE_UNIT
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.gpu_nodes import has_gpu_kernels
from ropewalk.model_runtime.layers.states.state_kernels import StateKernels
from ropewalk.model_runtime.state_shape import StateShape


def has_cpu_kernels(device: torch.device) -> bool:
    """Return whether the kernels that numba compiles serve the device."""
    return device.type == "cpu" and cpu_fault() is None


def cpu_fault() -> str | None:
    """Return why the CPU's kernels cannot be used, in one line; None if they can."""
    try:
        from ropewalk.model_runtime.cpu_kernels.trials import kernel_fault  # noqa: PLC0415
    except ImportError as error:  # versions beside each other that numba does not accept
        return f"{type(error).__name__}: {error}"
    return kernel_fault()


def state_kernels_for(device: torch.device) -> StateKernels | None:
    """Return the kernels that serve layers with states on the device; None if there are none."""
    if has_cpu_kernels(device):
        from ropewalk.model_runtime.layers.states.cpu_states import CpuStates  # noqa: PLC0415

        return CpuStates()
    if has_gpu_kernels(device):
        from ropewalk.model_runtime.gpu.states.calls import GpuStates  # noqa: PLC0415  # optional

        return GpuStates()
    return None


def state_store(
    layers: Mapping[int, StateShape], num_slots: int, device: torch.device
) -> SlotStore | None:
    """Return slots for states as the device's kernels expect them; None for no layers.

    Raises RuntimeError if memory is short.
    """
    if not layers:
        return None
    kernels = state_kernels_for(device)
    assert kernels is not None, "a model with states that nothing serves was not refused"
    return kernels.slots(layers, num_slots, device)


def backend_for(device: torch.device) -> type[Backend]:
    """Return the compiled backend; plain torch if neither numba nor triton serves the device."""
    if has_cpu_kernels(device):
        from ropewalk.model_runtime.attention.cpu_backend import CpuAttention  # noqa: PLC0415

        return CpuAttention
    if has_gpu_kernels(device):
        from ropewalk.model_runtime.gpu.backend import TritonAttention  # noqa: PLC0415  # optional

        return TritonAttention
    return TorchAttention


def exact_backend() -> type[Backend]:
    """Return the backend of exact_batches on a GPU; on a CPU, any other has the same bits."""
    from ropewalk.model_runtime.gpu.exact.attention import ExactAttention  # noqa: PLC0415  # optional

    return ExactAttention


def check_windows(layout: CacheLayout, plans: Mapping[int, LayerPlan]) -> None:
    """Raise ModelError if a layer reads more keys than the pages of its group keep."""
    places = layout.places()
    for index, plan in plans.items():
        if index not in places:
            raise ModelError(f"layer {index} has no pages among the groups that were planned")
        window = layout.groups.windows[places[index][0]]
        if window is not None and (plan.window is None or plan.window > window):
            reads = "all keys" if plan.window is None else f"{plan.window} keys"
            raise ModelError(
                f"layer {index} reads {reads}, and the config says {window} (sliding_window)"
            )


def new_store(
    layout: CacheLayout,
    num_pages: int,
    device: torch.device,
    *,
    num_tails: int = 0,
    scales: Mapping[int, Scales] | None = None,
) -> KVCache:
    """Return an empty cache for the device's backend. Raises ModelError.

    `num_tails`: sequences with a page that is not quantised yet, if full pages are. `scales`: of
    layers, which the format fixed8 needs.
    """
    layout.check()
    refuse_format_on(device, layout.format)
    if layout.quantises:
        return _quantised_store(layout, num_pages, num_tails)
    own_backend: type[Backend] | None = None
    if layout.rounds and has_cpu_kernels(device):
        from ropewalk.model_runtime.attention import cpu_backend  # noqa: PLC0415  # imports numba

        own_backend = cpu_backend.RoundedCpuAttention
        if layout.format == FIXED8:
            own_backend = cpu_backend.EightBitCpuAttention
    if layout.format == FIXED8:
        assert scales is not None, "a cache of codes needs their scales"
        scales = {index: each.of(device) for index, each in scales.items()}
    row_keys = backend_for(device).row_keys
    return KVCache(
        layout, num_pages, device, row_keys=row_keys, own_backend=own_backend, scales=scales
    )


def _quantised_store(layout: CacheLayout, num_pages: int, num_tails: int) -> QuantisedCache:
    if layout.page_size % PAGE_UNIT:
        raise ModelError(
            f"page_size must be a multiple of {PAGE_UNIT} for kv_cache_dtype {layout.format}, got "
            f"{layout.page_size}"
        )
    has_kernels = has_cpu_kernels(torch.device("cpu"))
    return QuantisedCache(layout, num_pages, num_tails=num_tails, has_kernels=has_kernels)


def described(device: torch.device) -> str:
    """Return the name of a device's backend, for the banner."""
    if has_gpu_kernels(device):
        return "Triton"
    if device.type != "cpu":
        return "torch"
    fault = cpu_fault()
    if fault is not None:
        return f"torch, slow (compiled kernels fail: {fault})"
    from ropewalk.model_runtime.cpu_kernels.target import vectors  # noqa: PLC0415

    return f"{vectors().name}, {vectors().lanes} lanes"


def long_prompt_tokens(device: torch.device) -> int:
    """Return the query tokens from which on a prompt is read by other kernels; 0: never."""
    if not has_gpu_kernels(device):
        return 0
    from ropewalk.model_runtime.gpu.cards.flash_4 import LEAST_TOKENS  # noqa: PLC0415
    from ropewalk.model_runtime.gpu.flash import serves_long_prompts  # noqa: PLC0415  # optional

    return LEAST_TOKENS if serves_long_prompts(device) else 0


def multiplies_pairs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels multiply numbers of this type in pairs, by a trial of both ways."""
    if not has_cpu_kernels(device):
        return False
    from ropewalk.model_runtime.cpu_kernels import trials  # noqa: PLC0415

    return trials.multiplies_pairs(dtype)
