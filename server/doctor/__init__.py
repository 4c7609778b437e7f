"""`ropewalk doctor`: whether this machine, its packages and a model are fit to serve.

May import: startup, settings. tests/test_layout.py checks it.
"""
