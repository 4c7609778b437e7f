"""ASGI middleware: API keys, limits, availability and HTTP metrics.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
