"""Kernels that numba compiles for the processor at hand.

May import: nothing of ours. tests/test_layout.py checks it.
"""
