"""Texts that are not used in training, and contexts with needles in them."""
