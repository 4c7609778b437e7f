"""From settings to a serving process, and to its end.

May import: api, middleware, settings. tests/test_layout.py checks it.
"""
