"""The routes, their bodies, and the path of a request through the service.

May import: middleware. tests/test_layout.py checks it.
"""
