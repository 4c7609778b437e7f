"""Which attention serves a device, and the cache as that attention wants it."""

from collections.abc import Mapping
from importlib.util import find_spec

import torch

from model_runtime.attention.cpu_backend import CpuAttention
from model_runtime.attention.paged_attention import Backend
from model_runtime.attention.torch_backend import TorchAttention
from model_runtime.cache.kv_cache import KVCache, LayerShape
from model_runtime.cpu_kernels.processor import vectors
from model_runtime.cpu_kernels.trials import kernel_fault


def backend_for(device: torch.device) -> type[Backend]:
    """The compiled kernels; plain torch on a device that is served by neither numba nor triton."""
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
    """An empty cache for the attention that serves the device."""
    row_keys = backend_for(device).row_keys
    return KVCache(layers, num_pages, page_size, dtype, device, row_keys=row_keys)


def described(device: torch.device) -> str:
    """The attention that serves a device, as the banner says it."""
    backend = backend_for(device)
    if backend is TorchAttention:
        fault = kernel_fault() if device.type == "cpu" else None
        return "torch" if fault is None else f"torch, slow (compiled kernels fail: {fault})"
    if backend is CpuAttention:
        return f"{vectors().name}, {vectors().lanes} lanes"
    return "Triton"
