"""Which weights are stored in few bits, their bytes, and quantisation at load."""
