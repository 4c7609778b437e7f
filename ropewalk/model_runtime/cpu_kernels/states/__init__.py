"""Kernels of layers that keep a state of each sequence: convolutions and the delta rule."""
