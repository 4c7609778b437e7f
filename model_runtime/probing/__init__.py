"""Probes of a model, trials of its modules, and the spread of its rounding, whatever its weights.

May import: attention, cache.
"""
