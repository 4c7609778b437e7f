"""Loads a model, takes its rotation over, and serves requests from a paged cache."""
