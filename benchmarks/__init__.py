"""Measures servers side by side: the same requests to two of them, in turns (README.md)."""
