"""Reads and writes of the paged cache, by device.

May import: cache, cpu_kernels. tests/test_layout.py checks it.
"""
