"""The HTTP service and its clients for a terminal."""
