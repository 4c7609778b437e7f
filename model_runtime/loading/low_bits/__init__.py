"""Weights in eight and four bits: which are stored so, how many bytes, how far from the original.

May import: what loading imports.
"""
