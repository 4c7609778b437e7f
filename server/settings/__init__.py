"""All settings, each defined once, and the sources of their values.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
