"""Read GGUF files: metadata, RoPE, tokenizer and weights.

May import: nothing of ours. tests/test_layout.py checks it. Only ggml.py imports the
package `gguf`.
"""
