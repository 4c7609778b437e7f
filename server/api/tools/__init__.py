"""Tools and reasoning on the chat route: bodies, the turn behind a request, the answer's parts.

May import what its parent may. tests/test_layout.py checks it.
"""
