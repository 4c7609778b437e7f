"""Linears and embeddings with weights of few bits."""
