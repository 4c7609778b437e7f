"""Files of weights: GGUF, and quantised safetensors.

Only ggml.py imports the package `gguf`.
"""
