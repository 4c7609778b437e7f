"""Fields that several bodies have: the scaling, the form of an answer, logprobs.

May import: strict_body. tests/test_layout.py checks it.
"""
