"""Linears and embeddings with weights of few bits, and their products.

May import: layers, cpu_kernels.
"""
