"""`ropewalk eval`: what a model still knows, by context length, method and policy."""
