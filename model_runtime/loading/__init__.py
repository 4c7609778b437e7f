"""Load a checkpoint, then patch and check its model.

May import: gguf, quantised, runner, layers, gpu_layers, probing, attention, cache, text,
cpu_kernels.
tests/test_layout.py checks it.
"""
