"""The engine: its thread, its step, and what a step does to its requests.

May import: everything else of model_runtime. tests/test_layout.py checks it.
"""
