"""The engine: its thread, its step and its requests."""
