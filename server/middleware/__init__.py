"""ASGI middleware: API keys, limits, availability and HTTP metrics.

May import: access. tests/test_layout.py checks it.
"""
