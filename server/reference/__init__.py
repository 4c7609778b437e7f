"""The page at /docs: every operation of the OpenAPI document, as HTML without scripts.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
