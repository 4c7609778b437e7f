"""The choice of tokens for the next step. The package does not import torch.

May import: cache. tests/test_layout.py checks it.
"""
