"""Mixtures of experts on a CPU: routing by fixed rules, and products that know one row each."""
