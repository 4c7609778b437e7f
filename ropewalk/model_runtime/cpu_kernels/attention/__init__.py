"""Kernels of the paged attention."""
