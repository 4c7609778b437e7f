"""Benchmarks: servers side by side (README.md), and kernels, layers and models alone (gpu.md)."""
