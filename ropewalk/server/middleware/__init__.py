"""ASGI middleware: API keys, limits, availability and HTTP metrics."""
