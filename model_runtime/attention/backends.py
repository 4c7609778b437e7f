"""The choice of the attention backend for a device, and a cache in that backend's layout."""

from collections.abc import Mapping
from importlib.util import find_spec

import torch

from model_runtime.attention.cpu_backend import CpuAttention
from model_runtime.attention.paged_attention import Backend
from model_runtime.attention.torch_backend import TorchAttention
from model_runtime.cache.kv_cache import KVCache
from model_runtime.cache.token_bytes import LayerShape
from model_runtime.cpu_kernels.processor import vectors
from model_runtime.cpu_kernels.trials import kernel_fault


def backend_for(device: torch.device) -> type[Backend]:
    """Return the compiled backend; plain torch if neither numba nor triton serves the device."""
    if device.type == "cpu" and kernel_fault() is None:
        return CpuAttention
    if device.type == "cuda" and find_spec("triton") is not None:
        from model_runtime.attention.triton_backend import TritonAttention  # noqa: PLC0415  # optional

        return TritonAttention
    return TorchAttention


def new_store(
    layers: Mapping[int, LayerShape],
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Return an empty cache in the layout of the device's backend."""
    row_keys = backend_for(device).row_keys
    return KVCache(layers, num_pages, page_size, dtype, device, row_keys=row_keys)


def described(device: torch.device) -> str:
    """Return the name of a device's backend, for the banner."""
    backend = backend_for(device)
    if backend is TorchAttention:
        fault = kernel_fault() if device.type == "cpu" else None
        return "torch" if fault is None else f"torch, slow (compiled kernels fail: {fault})"
    if backend is CpuAttention:
        return f"{vectors().name}, {vectors().lanes} lanes"
    return "Triton"
