"""Records, intervals, progress and plots of the commands that measure a model or a server.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
