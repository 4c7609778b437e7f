"""Kernels that numba compiles for the processor at hand."""
