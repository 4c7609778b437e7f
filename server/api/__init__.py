"""The routes, their bodies, and a request's way through the service.

May import: middleware. tests/test_layout.py checks it.
"""
