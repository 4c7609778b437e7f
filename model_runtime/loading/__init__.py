"""Load a checkpoint, then patch and check its model.

May import: gguf, runner, layers, attention, cache, text, cpu_kernels. tests/test_layout.py checks
it.
"""
