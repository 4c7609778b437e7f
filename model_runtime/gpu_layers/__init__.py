"""Modules of a transformers model as fewer kernels on a GPU; this package imports triton.

May import: layers, probing, attention, cache. tests/test_layout.py checks it.
"""
