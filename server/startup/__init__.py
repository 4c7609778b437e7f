"""Startup and shutdown of the server process, from its settings.

May import: access, api, middleware, settings. tests/test_layout.py checks it.
"""
