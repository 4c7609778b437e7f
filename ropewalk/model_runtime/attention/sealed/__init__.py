"""A cache whose full pages are in few bits (docs/kv-cache.md)."""
