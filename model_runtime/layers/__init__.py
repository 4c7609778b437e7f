"""Modules and forwards that replace those of a transformers model.

May import: probing, attention, cache, cpu_kernels. tests/test_layout.py checks it.
"""
