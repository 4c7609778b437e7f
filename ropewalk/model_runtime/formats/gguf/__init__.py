"""GGUF files: reading, their architectures, their tokenizers."""
