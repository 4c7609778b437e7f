"""Load a model, replace its rotation, and serve requests from a paged cache."""
