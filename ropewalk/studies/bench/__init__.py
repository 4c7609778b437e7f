"""`ropewalk bench`: latency against context length, measured over the public routes."""
