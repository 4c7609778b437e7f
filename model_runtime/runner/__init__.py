"""One forward pass, then sampling.

May import: layers, attention, cache, cpu_kernels. tests/test_layout.py checks it.
"""
