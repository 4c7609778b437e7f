"""`ropewalk inspect`: tables, costs and attention against distance.

May import: study, startup, settings, corpus. tests/test_layout.py checks it.
"""
