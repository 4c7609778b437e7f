"""Measure the KV cache: its formats, its windows and its pages on disk."""
