"""Startup and shutdown of the server process, from its settings."""
