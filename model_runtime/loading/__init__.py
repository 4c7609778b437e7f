"""From a checkpoint to a checked model that is ready to serve.

May import: runner, layers, attention, cache, text, cpu_kernels. tests/test_layout.py checks it.
"""
