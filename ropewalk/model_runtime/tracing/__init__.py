"""A model's forward as operations on rows, found by a run of it; for both kinds of device."""
