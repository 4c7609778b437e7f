"""Kernels over sealed pages, whose keys and values are in eight or four bits (docs/kv-cache.md)."""
