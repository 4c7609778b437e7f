"""`ropewalk eval`: quality of a model by context length, method and policy."""
