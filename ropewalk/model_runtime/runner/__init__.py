"""One forward pass, then sampling."""
