"""One model over several processes: each rank has a part of every weight and of the cache.

Only a server with tensor_parallel_size above 1 imports it.
"""
