"""One model over several processes: each rank has a part of every weight and of the cache.

May import: loading, probing, runner, layers, attention, cache, cpu_kernels.
tests/test_layout.py checks it. Only a server with tensor_parallel_size above 1 imports it.
"""
