"""Every setting once, and where its value comes from.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
