"""Sampling on a GPU."""
