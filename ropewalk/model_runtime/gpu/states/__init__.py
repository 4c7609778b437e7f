"""Layers with states on a GPU in Triton."""
