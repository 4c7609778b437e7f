"""What a model computes apart from its weights: probes, trials and the spread of rounding.

May import: attention, cache.
"""
