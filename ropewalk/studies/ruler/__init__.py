"""Samples of RULER's tasks by generators of our own, and their scores.

RULER is arXiv 2404.06654, https://github.com/NVIDIA/RULER.
"""
