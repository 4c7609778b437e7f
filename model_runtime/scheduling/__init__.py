"""Which tokens the next step computes. Knows no torch.

May import: cache. tests/test_layout.py checks it.
"""
