"""Who asks and how much: named keys and their bounds, and the access log.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
