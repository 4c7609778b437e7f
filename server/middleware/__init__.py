"""What stands around the application: keys, limits, availability, HTTP metrics.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
