"""Kernels over quantised pages: keys and values in eight or four bits (docs/design/kv-cache.md)."""
