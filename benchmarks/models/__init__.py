"""Make models with random weights, to measure with: `python -m benchmarks.models KIND`."""
