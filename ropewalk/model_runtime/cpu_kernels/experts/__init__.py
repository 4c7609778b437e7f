"""Kernels for mixtures of experts: products by expert, and the sum of a row's experts."""
