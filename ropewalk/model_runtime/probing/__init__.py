"""Probes of a model, trials of its modules, and the spread of its rounding, for any weights."""
