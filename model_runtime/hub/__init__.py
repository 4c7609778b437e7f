"""Models named by hub id: their files are downloaded to the hub's cache before anything is read.

May import: loading. tests/test_layout.py checks it.
"""
