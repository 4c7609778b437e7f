"""Kernels of layers that keep a state of each sequence: short convolutions, the gated delta rule.

May import: cpu_kernels.
"""
