"""Layers and attention on a GPU: Triton kernels, and torch's flash attention."""
