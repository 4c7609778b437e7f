"""The GPU's read and write of the paged cache: Triton kernels, and torch's flash attention.

May import: the attention folder, cache, and the batch, the work lists and the transfers of the
root. tests/test_layout.py checks it.
"""
