"""A cache whose full pages are in few bits (docs/design/kv-cache.md)."""
