"""The forward of a whole model on a CPU, from a trace of its own forward."""
