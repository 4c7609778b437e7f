"""Measure attention, one model and the server on a GPU; gpu.md describes it."""
