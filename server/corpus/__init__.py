"""Texts that are not used in training, and needles to hide in them.

May import: nothing of ours. tests/test_layout.py checks it.
"""
