"""Pages, prefixes, the tensors that hold keys and values, and rotation tables.

May import: cpu_kernels. tests/test_layout.py checks it.
"""
