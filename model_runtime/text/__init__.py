"""Tokens, chat templates and grammars.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
