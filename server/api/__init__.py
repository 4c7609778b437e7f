"""The routes, their bodies, and the path of a request through the service.

May import: middleware, settings. tests/test_layout.py checks it.
"""
