"""Measure products, steps and weights of a model on a CPU, without a server."""
