"""`ropewalk eval --policies`: the same sequences under each policy, across tiers.

May import: study, startup, settings, corpus. tests/test_layout.py checks it.
"""
