"""Measure one server: its start, its streams, its router, and the host's part of a step."""
