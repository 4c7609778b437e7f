"""Clients of a running server for a terminal: `ropewalk chat` and `ropewalk top`.

They know public routes only.
"""
