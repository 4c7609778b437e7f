"""The routes, their bodies, and the path of a request through the service.

May import: access, middleware, settings. tests/test_layout.py checks it.
"""
