"""The engine: its thread, its step and its requests.

May import: everything else of model_runtime. tests/test_layout.py checks it.
"""
