"""Measure what other programs do with the same model and load."""
