"""The harness of commands that measure: options, columns, cells, records, intervals and plots.

May import: nothing beside the root. tests/test_layout.py checks it.
"""
